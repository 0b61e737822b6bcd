"""What the loop tells a checkpoint: the loss of that very step, or none."""

import collections
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.train import loop as loops
from experiments.train.evaluation import Evaluator
from experiments.train.loop import TrainingLoop, best_by
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.engine import Engine
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def loop(monkeypatch):
    """A loop around stand-ins, at step 4."""
    monkeypatch.setattr(loops, "learnt", lambda config: {})
    monkeypatch.setattr(loops, "origin", lambda run: {})
    made = object.__new__(TrainingLoop)
    for name in ("run", "log", "records", "driver", "checkpoints", "display"):
        setattr(made, name, MagicMock())
    made.run.engine.clock = made.run.exchange = None
    made.run.job.method.anchors = "shared"
    made.run.job.config = {"eval": {"sequences": 9}}
    made.driver.step = lambda state: state.step
    made._spent, made._started = dict.fromkeys(loops.PHASES, 0.0), 0.0
    made.evaluation, made._evaluated_at, made._owed, made._ended = None, -1, False, None
    made._now, made._lasted = None, {}
    made._evaluated_progress, made._saved_at, made._came_at = 0, -1, -1
    made.state = MagicMock(step=4)
    made.evaluator = lambda state, leave: MagicMock(anchor=1.5, regions=None)
    return made


def saved(loop):
    loop._save()
    return loop.checkpoints.save.call_args.kwargs["metrics"]


def test_a_checkpoint_is_judged_by_its_own_loss(loop):
    """With that of an earlier step the wrong checkpoint would be kept as the best one."""
    assert saved(loop) == {}
    loop._evaluate(lambda: False)
    assert saved(loop) == {"anchor on 9 sequences": 1.5}
    loop.state = SimpleNamespace(step=6)
    assert saved(loop) == {}


@pytest.mark.parametrize(
    ("came", "by_rounds", "lost"), [(-1, False, True), (4, False, None), (-1, True, None)]
)
def test_who_was_never_counted_has_lost_what_it_learnt_since_it_came(loop, came, by_rounds, lost):
    """Who came in at the end has learnt nothing."""
    loop.run.exchange, loop._came_at = MagicMock(), came
    loop.run.job.by_rounds = by_rounds
    loop.run.exchange.never_counted = lambda sends: True
    assert loop._left_out() is lost


def test_an_evaluation_judges_the_checkpoint_of_its_step(loop):
    """Of one that was saved before it: in the middle of a run, at its end, or before a restart."""
    loop._evaluate(lambda: False)
    loop.checkpoints.add_metrics.assert_not_called()
    saved(loop)
    loop._evaluate(lambda: False)
    loop.checkpoints.add_metrics.assert_called_once_with(4, {"anchor on 9 sequences": 1.5})
    loop.state = MagicMock(step=6)
    loop._evaluate(lambda: False)
    loop.checkpoints.add_metrics.assert_called_once()


def test_a_signal_is_told_what_is_under_way_and_for_how_long(loop, monkeypatch):
    clock = iter([10.0, 14.0, 20.0, 20.5, 21.0])
    monkeypatch.setattr(loops.time, "perf_counter", lambda: next(clock))
    with loop._phase("eval"):
        pass
    with loop._phase("eval"):
        said = loop._under_way()
    assert said == "a batch of the evaluation (0.5 s so far, the last took 4.0 s)"


def test_seconds_of_a_phase_inside_another_are_booked_once(loop, monkeypatch):
    """As of a save in the middle of an evaluation, or of batches that a chunk waits for."""
    clock = iter([10.0, 12.0, 15.0, 20.0])
    monkeypatch.setattr(loops.time, "perf_counter", lambda: next(clock))
    with loop._phase("eval"), loop._phase("checkpoint"):
        pass
    assert (loop._spent["eval"], loop._spent["checkpoint"]) == (7.0, 3.0)
    assert loop._lasted == {"eval": 10.0, "checkpoint": 3.0}


def test_seconds_go_on_where_they_were(loop, monkeypatch):
    """A run of 40 s that is continued at 1000 s of this process has run 40 s."""
    loop._started = 1000.0
    monkeypatch.setattr(loops.time, "perf_counter", lambda: 1003.0)
    loop.driver.progress = lambda state: state.step
    loop.restore({"records": {}, "seconds": 40.0, "owed_evaluation": False, "ended": None}, 4)
    assert loop.seconds == 43.0
    assert loop._shown == (4, 40.0)


def test_a_chunk_that_is_read_late_changes_no_pace(loop, monkeypatch):
    """After the first chunk, which compiles: 10 steps of 100 tokens in 10 s, then 10 in no time."""
    loop._mark, loop._shown, loop._timed = 0.0, (0, 0.0), False
    loop._recent = collections.deque(maxlen=8)
    loop.records.tokens, loop.records.stuck = 0, 0
    loop.run.job.steps = 50

    def make(rows, count, start, end):
        loop.records.tokens += 100 * count
        return [{"seconds": end, "loss_mean": 1.0, "step": 0}]

    loop.records.make = make
    for done, seconds in ((10, 90.0), (20, 100.0), (30, 100.0)):
        monkeypatch.setattr(loops.time, "perf_counter", lambda now=seconds: now)
        history = MagicMock(__len__=lambda self: 10)
        history.rows.return_value = iter([{}] * 10)
        loop._unread = [history], done
        loop._read()
    shown = [call.args[0] for call in loop.display.update.call_args_list]
    # All at once they made 20 steps in 10 s.
    assert [now.tokens_per_second for now in shown] == pytest.approx([1000 / 90, 100, 200])
    assert [now.seconds_left for now in shown] == [None, 30.0, 10.0]


@pytest.fixture(scope="module")
def run(tiny, root):
    """Trains 12 steps in a folder of this name, with evaluations of three batches each."""

    def train(name):
        return main(
            [
                "train",
                *tiny.arguments(
                    root,
                    "--config=diloco",
                    "--config.steps=12",
                    "--config.method.period=4",
                    "--config.eval.every=4",
                    "--config.log.every=4",
                    "--config.inner.warmup_steps=2",
                    f"--workdir={root / name}",
                    "--quiet",
                ),
            ]
        )

    return train


@pytest.fixture(scope="module")
def whole(run, root):
    """The evaluations of a run that nothing has stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        assert run("whole") == 0
    assert [step for step, _, _ in losses(root / "whole")] == [0, 4, 8, 12]
    return losses(root / "whole")


def test_the_last_checkpoint_is_found_as_the_best(root, whole):
    """It is saved before it is evaluated."""
    best_of = best_by(read_records(root / "whole" / "metrics.jsonl")[0]["config"])
    with Checkpoints(root / "whole" / "checkpoints", keep_best=best_of) as checkpoints:
        assert whole[-1][2] == min(loss for _, _, loss in whole)
        assert checkpoints.best() == checkpoints.latest() == 12
    assert metrics(root / "whole", 12) == [whole[-1][2]]


@pytest.mark.parametrize(("name", "at"), [("first", 0), ("inside", 8)])
def test_a_signal_takes_no_evaluation_away(name, at, run, root, whole, monkeypatch):
    """One before the first step, one in the chunk that ends where an evaluation is due."""
    monkeypatch.chdir(REPOSITORY)
    interrupted_at(monkeypatch, at)
    assert [run(name), run(name)] == [EXIT_INTERRUPTED, 0]
    assert losses(root / name) == whole


@pytest.mark.parametrize(("step", "kind"), [(8, "signal"), (12, "signal"), (12, "crash")])
def test_within_an_evaluation(step, kind, run, root, whole, monkeypatch, capfd):
    """A signal is noticed before the next batch. The last evaluation begins when all is saved: what
    then goes on makes no step, synchronises no more, and only evaluates."""
    monkeypatch.chdir(REPOSITORY)
    name, asked = f"{kind} {step}", []
    evaluate = Evaluator.__call__

    def struck(self, state, leave):
        def after_a_batch():
            asked.append(int(state.counters.step))
            if asked.count(step) == 2 and kind == "crash":
                raise OSError("the machine is gone")
            if asked.count(step) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return leave()

        return evaluate(self, state, after_a_batch)

    monkeypatch.setattr(Evaluator, "__call__", struck)
    if kind == "signal":
        assert run(name) == EXIT_INTERRUPTED
    else:
        with pytest.raises(OSError, match="gone"):
            run(name)
    assert asked[-1] == step and asked.count(step) == 2
    assert losses(root / name) == [one for one in whole if one[0] < step]
    assert metrics(root / name, step) == []
    monkeypatch.setattr(Evaluator, "__call__", evaluate)
    if step == 12:
        for owner, act in ((loops.FixedDriver, "calls"), (Engine, "finish")):
            monkeypatch.setattr(owner, act, lambda *a, **b: pytest.fail("it was done already"))
    assert run(name) == 0
    assert losses(root / name) == whole
    assert metrics(root / name, step) == [one[2] for one in whole if one[0] == step]
    kinds = [r["kind"] for r in read_records(root / name / "metrics.jsonl")]
    assert kinds.count("resume") == kinds.count("eval_set") == 1  # the same set
    got, want = (read_records(root / n / "metrics.jsonl")[-1] for n in (name, "whole"))
    assert {**got, "seconds": 0} == {**want, "seconds": 0}
    monkeypatch.undo()
    capfd.readouterr()
    assert run(name) == 0 and "is complete (step 12)" in capfd.readouterr().out


def interrupted_at(monkeypatch, progress):
    """A signal comes once: while step 0 is evaluated, or in the chunk that ends at a step."""
    left, evaluate, calls = [True], TrainingLoop._evaluate, loops.FixedDriver.calls

    def signalled(self, now):
        if left and now == progress:
            left.clear()
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluated(self, *arguments, **named):
        signalled(self, 0 if self.progress == 0 else None)
        evaluate(self, *arguments, **named)

    def called(self, now, *arguments):
        yield from calls(self, now, *arguments)
        signalled(self, self.progress(now()))

    monkeypatch.setattr(TrainingLoop, "_evaluate", evaluated)
    monkeypatch.setattr(loops.FixedDriver, "calls", called)


def losses(folder):
    found = read_records(folder / "metrics.jsonl")
    return [(r["step"], r["tokens"], r["anchor"]) for r in found if r["kind"] == "eval"]


def metrics(folder, step):
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return list(checkpoints.document(step)["metrics"].values())
