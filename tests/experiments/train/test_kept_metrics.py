"""What the loop tells a checkpoint: the loss of that very step, or none."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from experiments.train import loop as loops
from experiments.train.loop import BEST, Loop


@pytest.fixture
def loop(monkeypatch):
    """A loop around stand-ins, at step 4."""
    monkeypatch.setattr(loops, "identity", lambda config: {})
    made = object.__new__(Loop)
    for name in ("run", "log", "records", "driver", "checkpoints", "display"):
        setattr(made, name, MagicMock())
    made.run.engine.clock = made.run.exchange = None
    made.run.job.method.anchors = "shared"
    made.driver.step = lambda state: state.step
    made._spent, made._started = dict.fromkeys(loops.PHASES, 0.0), 0.0
    made.evaluation, made._evaluated_at = None, -1
    made.state = MagicMock(step=4)
    made.evaluator = lambda state: MagicMock(anchor=1.5, regions=None)
    return made


def saved(loop):
    loop._save()
    return loop.checkpoints.save.call_args.kwargs["metrics"]


def test_a_checkpoint_is_judged_by_its_own_loss(loop):
    """With that of an earlier step the wrong checkpoint would be kept as the best one."""
    assert saved(loop) == {}
    loop._evaluate()
    assert saved(loop) == {BEST: 1.5}
    loop.state = SimpleNamespace(step=6)
    assert saved(loop) == {}


def test_seconds_go_on_where_they_were(loop, monkeypatch):
    """A run of 40 s that is continued at 1000 s of this process has run 40 s."""
    loop._started = 1000.0
    monkeypatch.setattr(loops.time, "perf_counter", lambda: 1003.0)
    loop.driver.progress = lambda state: state.step
    loop.restore({"records": {}, "seconds": 40.0})
    assert loop.seconds == 43.0
    assert loop._shown == (4, 40.0)
