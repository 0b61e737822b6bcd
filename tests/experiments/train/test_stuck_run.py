"""A run in which no gradient is finite any more ends, and says so."""

import pytest

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.train.loop import StuckError
from experiments.train.records import StepRecords
from lowcomm_jax.optimizers import InnerConfig


def start(tiny, root, name, *more):
    given = [*tiny.arguments(root), *more, f"--workdir={root / name}", "--config.log.every=5"]
    return main(["train", "--config=diloco", *given])


def steps_of(workdir):
    return [r for r in read_records(workdir / "metrics.jsonl") if r["kind"] == "step"]


def test_a_rate_that_breaks_everything(tiny, root, capsys):
    """A round's first step is finite, leads nowhere, and all go back to the anchor."""
    broken = ["--config.inner.learning_rate=1e30", "--config.inner.warmup_steps=0"]
    assert start(tiny, root, "broken", *broken, "--config.steps=400") == StuckError.code == 3
    shown = capsys.readouterr()
    assert "no region has learnt anything since step" in shown.err
    assert "Lower inner.learning_rate" in shown.err
    assert "steps skipped" in shown.out
    steps = steps_of(root / "broken")
    assert 50 <= steps[-1]["step"] < 100
    assert not any(step["participation"] for step in steps)


def test_scripted_faults_may_spoil_all_regions_for_a_while(tiny, root, capsys):
    """As in jobs, which go on: it repeats what they did."""
    script = root / "faults.yaml"
    script.write_text("".join(f"- {{step: 10, kind: nan, region: {r}}}\n" for r in range(2)))
    given = ["--config.regions=2", "--config.method.period=80", "--config.steps=120"]
    given += [f"--config.faults={script}"]
    assert start(tiny, root, "spoilt", *given) == 0, capsys.readouterr().err
    assert "steps skipped" in capsys.readouterr().out
    steps = steps_of(root / "spoilt")
    lost = [step["step"] for step in steps if step["loss_mean"] is None]
    assert len(lost) > 50 and steps[-1]["loss_mean"] is not None


def test_what_counts():
    """Steps that all skip, and exchanges that all are left out of."""
    records = StepRecords(2, lambda row, skipped_R: 0.1)

    def after(skipped, sent=None, left_out=(0, 0)):
        event = {"kind": "send", "step": 1, "participants": sent, "left_out": left_out}
        event |= {"bytes_sent": [0, 0], "bytes_received": [0, 0], "key": "k"}
        row = {"step": 1, "tokens": [1, 1], "loss": [1.0, 1.0], "grad_norm": [1.0, 1.0]}
        row |= {"skipped": skipped, "events": [event] if sent else []}
        records.make(iter([row]), 1, 0.0, 1.0)
        return records.stuck

    assert after([1.0, 0.0]) == 0
    assert [after([1.0, 1.0]), after([1.0, 1.0])] == [1, 2]
    assert after([0.0, 1.0]) == 0
    assert after([1.0, 1.0], [True, True], (1, 1)) == 1
    assert after([0.0, 0.0]) == 2  # after which it went back
    state = records.state()
    records = StepRecords(2, lambda row, skipped_R: 0.1)
    records.restore(state)
    assert after([0.0, 0.0]) == 3
    assert after([0.0, 0.0], [True, True], (0, 1)) == 0
    assert after([0.0, 0.0], [False, False]) == 0  # nobody was there: no sign of trouble
    assert records.skipped.tolist() == [4, 4]


@pytest.mark.parametrize("field", ["learning_rate", "weight_decay", "eps"])
def test_numbers_that_are_not_finite_are_refused(field):
    for value in (float("inf"), float("nan")):
        (line,) = InnerConfig(**{field: value}, warmup_steps=0).violations(100)
        assert line.startswith(f"{field}={value}")
