"""A run interrupted by SIGTERM and started again writes the metrics of one that ran through."""

import signal

import pytest
from launched import comparable, killed_at_last, reached, start

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.workdir import METRICS
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

STEPS = 500
LINKS = """
name: links
regions: [a, b, c]
compute_s: [0.1, 0.2, 0.15]
bandwidth_gbps: 0.001
delay_ms: 40
compute_jitter: {kind: lognormal, scale: 0.3}
"""


def arguments(tiny, root, workdir):
    return tiny.arguments(
        root,
        "--config=streaming_diloco",
        f"--config.steps={STEPS}",
        "--config.method.period=8",
        "--config.method.fragments=2",
        "--config.method.overlap=3",
        "--config.participation=0.8",
        f"--config.network={root / 'links.yaml'}",
        "--config.log.every=10",
        "--config.eval.every=250",
        "--config.checkpoint.every=200",
        f"--workdir={workdir}",
    )


@pytest.mark.slow
def test_interrupted_equals_uninterrupted(tiny, tmp_path):
    tiny.corpus(tmp_path / "texts")
    (tmp_path / "links.yaml").write_text(LINKS)
    workdir = tmp_path / "broken"
    command = ["train", *arguments(tiny, tmp_path, workdir)]
    broken = start(*command)
    with killed_at_last([broken]):
        reached(broken, workdir, 20)
        broken.send_signal(signal.SIGTERM)
        output, _ = broken.communicate(timeout=60)
    assert broken.returncode == EXIT_INTERRUPTED, output
    assert "run the same command to continue" in output
    done = sum(r["kind"] == "step" for r in read_records(workdir / METRICS))
    assert 20 <= done < STEPS
    again = start(*command)
    with killed_at_last([again]):
        assert main(["train", *arguments(tiny, tmp_path, tmp_path / "whole")]) == 0
        output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    got, want = comparable(workdir), comparable(tmp_path / "whole")
    assert [r.get("step") for r in got] == [r.get("step") for r in want]
    assert got == want
    assert any(r.get("participation") not in (None, 1.0) for r in got)
    resumed = [r["step"] for r in read_records(workdir / METRICS) if r["kind"] == "resume"]
    assert resumed == [done]
