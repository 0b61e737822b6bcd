"""A run interrupted by SIGTERM and started again writes the metrics of one that ran through."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.metrics import read_records
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

REPOSITORY = Path(__file__).resolve().parents[3]
TIMING = ("seconds", "tokens_per_second", "time")
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


def start(tiny, root, workdir):
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", "train", *arguments(tiny, root, workdir)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_steps(metrics, count, process):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.is_file() and metrics.read_text().count('"kind":"step"') >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {count} steps were logged: {process.communicate()[0]}")


def comparable(path):
    records = [r for r in read_records(path) if r["kind"] not in ("resume", "interval")]
    return [{k: v for k, v in r.items() if k not in TIMING} for r in records]


@pytest.mark.slow
def test_interrupted_equals_uninterrupted(tiny, tmp_path):
    tiny.corpus(tmp_path / "texts")
    (tmp_path / "links.yaml").write_text(LINKS)
    broken = start(tiny, tmp_path, tmp_path / "broken")
    wait_for_steps(tmp_path / "broken" / "metrics.jsonl", 20, broken)
    broken.send_signal(signal.SIGTERM)
    output, _ = broken.communicate(timeout=60)
    assert broken.returncode == EXIT_INTERRUPTED, output
    assert "run the same command to continue" in output
    done = len(
        [r for r in read_records(tmp_path / "broken" / "metrics.jsonl") if r["kind"] == "step"]
    )
    assert 20 <= done < STEPS
    again = start(tiny, tmp_path, tmp_path / "broken")
    assert main(["train", *arguments(tiny, tmp_path, tmp_path / "whole")]) == 0
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    got, want = (comparable(tmp_path / name / "metrics.jsonl") for name in ("broken", "whole"))
    assert [r.get("step") for r in got] == [r.get("step") for r in want]
    assert got == want
    assert any(r.get("participation") not in (None, 1.0) for r in got)
    resumed = [
        r for r in read_records(tmp_path / "broken" / "metrics.jsonl") if r["kind"] == "resume"
    ]
    assert [r["step"] for r in resumed] == [done]
