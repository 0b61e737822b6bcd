"""NoLoCo with random routing from the command line: train, stop, continue, evaluate, report."""

import jax
import numpy as np
import optax
import pytest
from launched import comparable

from experiments.__main__ import main
from experiments.train.evaluation import spread_sequences
from experiments.train.stopping import Stopping
from experiments.trained.anchor import load_trained
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

STEPS, STOP, PERIOD = 6, 3, 2
LINKS = """
name: links
regions: [a, b]
compute_s: [0.1, 0.2]
bandwidth_gbps: 0.01
delay_ms: 40
"""
pytestmark = [
    pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices"),
    pytest.mark.slow,
]


def command(tiny, root, name):
    return tiny.arguments(
        root,
        "--config=configs/noloco.py",
        f"--config.steps={STEPS}",
        f"--config.method.period={PERIOD}",
        "--config.regions=2",
        "--config.mesh.region=2",
        "--config.mesh.stage=2",
        "--config.model.layers=2",
        "--config.random_routing=True",
        f"--config.network={root / 'links.yaml'}",
        "--config.checkpoint.every=2",
        f"--workdir={root / name}",
        "--quiet",
    )


def test_a_routed_run_from_the_command_line(tmp_path, tiny, monkeypatch, capsys):
    tiny.corpus(tmp_path / "texts")
    (tmp_path / "links.yaml").write_text(LINKS)
    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "at", lambda self, step, state: step >= STOP)
        assert main(["train", *command(tiny, tmp_path, "broken")]) == EXIT_INTERRUPTED
    for name in ("broken", "whole"):
        assert main(["train", *command(tiny, tmp_path, name)]) == 0
    got, want = (comparable(tmp_path / name) for name in ("broken", "whole"))
    assert got[1:] == want[1:]

    steps = [r for r in want if r["kind"] == "step"]
    losses = np.array([r["loss"] for r in steps])
    assert losses.shape == (STEPS, 2) and losses[-1].mean() < losses[0].mean()
    # Every step's hops are booked beside the rounds' pseudo-gradients and anchors.
    routed = [e for r in steps for e in r["events"] if e["kind"] == "route"]
    others = [e for r in steps for e in r["events"] if e["kind"] != "route"]
    assert [e["step"] for e in routed] == list(range(1, STEPS + 1))
    assert any(e["nbytes"] for e in routed)
    total = sum(np.array(e["bytes_sent"]) for e in routed + others)
    np.testing.assert_array_equal(steps[-1]["bytes_sent"], total)
    end = want[-1]
    assert end["virtual"]["exposed_R"][0] > 0.04 * len(routed[0]["hops"])

    # The last evaluation took the fixed path: it is that of the model in one piece.
    trained = load_trained(tmp_path / "whole")
    data = spread_sequences(trained.run.evaluation, 20, 8)
    tokens, mask = (data[name].reshape(-1, data[name].shape[-1]) for name in ("tokens", "mask"))
    logits = trained.run.whole.logits(trained.params, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    last = [r for r in want if r["kind"] == "eval"][-1]
    assert (losses * mask).sum() / mask.sum() == pytest.approx(last["anchor"], rel=1e-5)

    capsys.readouterr()
    found = main(["report", str(tmp_path / "whole"), f"--network={tmp_path / 'links.yaml'}"])
    assert found == 0 and "utilisation" in capsys.readouterr().out
