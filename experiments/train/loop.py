"""The training loop: chunks of steps, metrics records, evaluations and checkpoints.

`TrainingLoop.train` advances the state in chunks that end where an evaluation, a checkpoint or a
log line is due. The loop reads and writes the metrics of a chunk only after it has dispatched the
next one, so that the device does not wait for the host. Chunks of drivers that wait
(`Driver.waits`) are read at once. Long chunks are read before the next one is dispatched:
dispatching waits for most of them (`batch_blocks.DispatchLimit`), and records hold the time of
their own steps.
"""

from __future__ import annotations

import collections
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from experiments.cli import EndedError
from experiments.faults.simulated import SimulatedFaults
from experiments.metrics import MetricsLog
from experiments.progress import Display, Now
from experiments.train.assemble import Run
from experiments.train.disk import require_room, written
from experiments.train.drivers import AdaptiveDriver, Driver, FixedDriver, RoundDriver
from experiments.train.evaluation import Evaluation, Evaluator
from experiments.train.header import origin
from experiments.train.records import StepRecords
from experiments.train.stopping import Stopping
from experiments.workdir import learnt
from lowcomm_jax.adloco.state import AdaptiveState
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.history import History
from lowcomm_jax.interrupt import Interrupt
from lowcomm_jax.models.protocol import flops_per_token
from lowcomm_jax.network import clock_state, restore_clock
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.state.train_state import TrainState

STUCK_STEPS = 50
"""A run ends after so many steps in a row from which no region learns anything."""
LONG_S = 0.5
"""Seconds of a chunk from which on the time to read it does not count."""
log = logging.getLogger(__name__)
PHASES = {
    "data": "the batch under way",
    "dispatch": "the steps under way",
    "wait": "the steps under way",
    "eval": "a batch of the evaluation",
    "checkpoint": "the save under way",
}
"""What a run does, by the names in its records; as a signal's line says what it stops after."""


def best_by(config: Mapping[str, Any]) -> str:
    """The metric that the best checkpoint is chosen by; losses of other texts have another name."""
    return f"anchor on {config['eval']['sequences']} sequences"


class StuckError(EndedError):
    """No region has learnt anything for `STUCK_STEPS`: gradients or values were not finite."""

    code = 3

    def __init__(self, steps: int, last: int):
        super().__init__(
            f"no region has learnt anything since step {last - steps}: in the last {steps} steps "
            "gradients or pseudo-gradients were not finite, so that all were left out. Lower "
            "inner.learning_rate, or lengthen inner.warmup_steps, and begin in another --workdir"
        )


class NotCountedError(EndedError):
    """A region of several jobs has come to the end, and the others did not count it."""

    def __init__(self, step: int):
        super().__init__(
            f"complete (step {step}), but the others counted nothing of this region's last "
            "exchanges: what it learnt since is in no anchor. Its log says when that began; see "
            "whether the others reach its address, and whether it is too slow for them"
        )


class TrainingLoop:
    """Trains one run on from a state.

    Attributes:
      state: the current training state.
      evaluation: the last one made; None before the first.
    """

    def __init__(
        self,
        run: Run,
        state: TrainState | AdaptiveState,
        evaluator: Evaluator,
        log: MetricsLog,
        checkpoints: Checkpoints,
        display: Display,
        came_in: bool = False,
    ):
        """`came_in`: another region gave the state, and this one has made no step from it yet."""
        self.run, self.state, self.log = run, state, log
        self.evaluator, self.checkpoints, self.display = evaluator, checkpoints, display
        self.driver = _driver(run, lambda: self._phase("data"))
        self.records = StepRecords(len(run.job.here), self.driver.rate)
        self.faults = SimulatedFaults(run, state)
        self.evaluation: Evaluation | None = None
        self._evaluated_at = -1
        self._evaluated_progress = 0
        self._saved_at = -1  # the step of a checkpoint that holds the state of that step
        self._came_at = self.step if came_in else -1
        self._owed = self.step == 0  # an evaluation that is due before the next step
        # What the last record needs of the time before `finish`; None = that is still to come.
        self._ended: dict[str, Any] | None = None
        self._timed = False
        self._took = math.inf  # seconds of the last chunk that was read
        self._shown = self.progress, 0.0
        # Of the last chunks: progress, tokens, seconds of training, seconds in all.
        self._recent: collections.deque[tuple[float, ...]] = collections.deque(maxlen=8)
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._now: tuple[str, float] | None = None  # a phase, and when it began
        self._lasted: dict[str, float] = {}  # seconds of the last phase of each name
        # What the last chunk's calls have reported, and the progress after them.
        self._unread: tuple[list[History], int] | None = None
        self._started = self._mark = time.perf_counter()

    @property
    def step(self) -> int:
        """Inner steps done."""
        return self.driver.step(self.state)

    @property
    def progress(self) -> int:
        """Nominal steps done (see `drivers`)."""
        return self.driver.progress(self.state)

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run, pauses between restarts left out."""
        return time.perf_counter() - self._started

    def restore(self, extra: dict[str, Any], saved_at: int) -> None:
        """Take the host's counts from a checkpoint, where they are `extra`.

        Args:
          saved_at: the step of the checkpoint; -1 = the state is not the one it holds.
        """
        self.records.restore(extra["records"])
        self._owed = extra["owed_evaluation"]
        self._ended = extra["ended"]
        self._started -= extra["seconds"]
        self._shown = self.progress, extra["seconds"]
        self._saved_at = saved_at
        if self.run.engine.clock is not None:
            restore_clock(self.run.engine.clock, extra["clock"])

    @property
    def uncounted(self) -> bool:
        """Whether the run has ended, and the others have not counted this region (`_finish`)."""
        return self.ended and bool(self._ended.get("uncounted"))

    @property
    def ended(self) -> bool:
        """Whether the state is that of after `finish`: at most an evaluation is left to do."""
        return self._ended is not None

    def train(self, interrupt: Interrupt) -> bool:
        """Train to the last step, or until a signal; returns whether the run is complete.

        What was saved is on disk then.
        """
        job = self.run.job
        self._stopping = Stopping(self.run, interrupt)
        if self.run.exchange is not None:
            self.run.exchange.stop_when(self._stopping.in_a_wait)
        interrupt.under_way = self._under_way
        if self._owed and not self.ended:
            self._evaluate(self._leave)
        while self.progress < job.steps and not self._stopping.at(self.step, self.state):
            self._chunk()
        if self.progress >= job.steps:
            complete = self._finish(interrupt)
        else:
            complete = False
            self._read()
            self._save()
        with written(job.workdir, self.checkpoints.steps()):
            self.checkpoints.wait()
        return complete

    def _leave(self) -> bool:
        """Whether to stop before the next batch of an evaluation; the run that goes on makes it."""
        if self._stopping.at(self.step, self.state):
            return True
        if self._stopping.begins():
            self._save_at_once()
        return False

    def _under_way(self) -> str:
        phase = self._now  # once: this is another thread
        if phase is None:
            return "what is under way"
        (name, since), now = phase, time.perf_counter()
        last = f", the last took {self._lasted[name]:.1f} s" if name in self._lasted else ""
        return f"{PHASES[name]} ({now - since:.1f} s so far{last})"

    # -- a chunk --------------------------------------------------------------------------------

    def _chunk(self) -> None:
        """Train up to the next step at which something is due."""
        config, steps, done = self.run.job.config, self.run.job.steps, self.progress
        every = {k: config[k]["every"] for k in ("log", "eval", "checkpoint")}
        target = min(steps, *(_next(done, n) for n in every.values() if n))
        target = self.faults.begin(done, target)
        if self._took > LONG_S:
            self._read()
        self._advance(target)
        if self._stopping.begins():
            self._save_at_once()
            within = self.run.engine.sync_loop(self.state).carrier.paused
            if within:
                self._saved_at = -1  # the step goes on: another state has its number then
            # What all agree on may be this very step.
            goes_on = self.progress < target and not self._stopping.at(self.step, self.state)
            if within or goes_on:
                self._advance(target)
        if self.progress >= steps:
            return
        self._owed = bool(every["eval"]) and self.progress >= _next(done, every["eval"])
        if self._stopping.at(self.step, self.state):
            return  # the run that goes on evaluates first
        if self._owed:
            self._read()
            self._evaluate(self._leave)
        if self._owed:
            return  # a signal came
        if every["checkpoint"] and self.progress >= _next(done, every["checkpoint"]):
            self._read()
            self._save()

    def _advance(self, target: int) -> None:
        """Train up to this progress, or until a signal comes."""
        histories, count = [], target - self.progress
        with self._phase("dispatch"):
            for given in self.driver.calls(lambda: self.state, count, self._stopping):
                self.state, history = self.run.engine.run(
                    self.state, participants=self.faults.participants, **given
                )
                histories.append(history)
            self.state = self.faults.end(self.progress, self.state)
        self._read()
        self._unread = histories, self.progress
        if self.driver.waits:
            self._read()

    def _save_at_once(self) -> None:
        """Save where a signal has come, before the run goes on to where all jobs stop."""
        self._read()
        self._save()
        with written(self.run.job.workdir, self.checkpoints.steps()):
            self.checkpoints.wait()
        log.warning("saved at step %d; this job goes on to where all of them stop", self.step)

    # -- what is written ------------------------------------------------------------------------

    def _read(self) -> None:
        """Fetch and write what the last chunk reported; waits until the device has done it."""
        unread, self._unread = self._unread, None
        if unread is None or not any(map(len, unread[0])):
            return
        histories, done = unread
        with self._phase("wait"):
            rows = [row for history in histories for row in history.rows()]
        now, started = time.perf_counter(), self._started
        self._took, before = now - self._mark, self.records.tokens
        records = self.records.make(iter(rows), len(rows), self._mark - started, now - started)
        self._mark = now
        self.log.write([*records, self._interval(len(rows), records[-1])])
        last, steps = records[-1], self.run.job.steps
        # One chunk may be read together with the next, which then seems to take no time.
        passed = done - self._shown[0], last["seconds"] - self._shown[1]
        self._recent.append((passed[0], self.records.tokens - before, self._took, passed[1]))
        progress, tokens, trained, whole = map(sum, zip(*self._recent, strict=True))
        self._shown, left = (done, last["seconds"]), max(steps - done, 0)
        self.display.update(
            Now(
                step=steps - left,  # a last step whose batch has grown may go beyond
                steps=steps,
                loss=last["loss_mean"],
                eval_loss=self.evaluation and self.evaluation.anchor,
                eval_step=self._evaluated_progress,
                tokens_per_second=tokens / trained,
                mfu=_mfu(self.run, tokens / trained),
                bytes_sent=float(self.records.sent.mean()),
                skipped=int(self.records.skipped.sum()),
                # The first interval compiles: its pace foretells nothing.
                seconds_left=whole / max(progress, 1) * left if self._timed else None,
            )
        )
        if not self._timed:
            self._recent.clear()
        self._timed = True
        # Else the others' anchor may help, or the end of a scripted fault.
        alone = self.run.exchange is None and not self.run.job.faults
        if alone and self.records.stuck >= min(STUCK_STEPS, steps):
            raise StuckError(self.records.stuck, last["step"])

    def _interval(self, steps: int, last: dict[str, Any]) -> dict[str, Any]:
        phases = {name: round(spent, 5) for name, spent in self._spent.items()}
        self._spent = dict.fromkeys(PHASES, 0.0)
        return {
            "kind": "interval",
            "step": last["step"],
            "steps": steps,
            "seconds": last["seconds"],
            "phases": phases,
        }

    def _evaluate(self, leave: Callable[[], bool], final: bool = False) -> None:
        """Evaluate and write what was found; still owed where `leave` said yes on the way."""
        with self._phase("eval"):
            found = self.evaluator(self.state.whole(), leave)
        if found is None:
            return
        self.evaluation = found
        self._evaluated_at, self._evaluated_progress = self.step, self.progress
        if self._saved_at == self.step:  # first: who is killed before the record evaluates again
            with written(self.run.job.workdir, [self.step]):
                self.checkpoints.add_metrics(self.step, self._metrics())
        self._owed = False
        record = {
            "kind": "eval",
            "step": self.step,
            "tokens": self.records.tokens,
            "seconds": round(self.seconds, 4),
            "final": final,
            "anchor": found.anchor,
            "mean_of_regions": found.mean,
            "document_sum": [round(x, 4) for x in found.document_sum.tolist()],
        }
        if found.regions:
            record["regions"] = list(found.regions)
        if self.run.exchange is not None and self.state.counters.behind:
            record["behind"] = int(self.state.counters.behind)
        if self.run.job.method.anchors == "per_region":
            record["anchor_variance"] = found.anchor_variance
        self.log.write([record, self._end()] if final else [record])
        self._mark = time.perf_counter()

    def _end(self) -> dict[str, Any]:
        end = {
            "kind": "end",
            "step": self.step,
            "tokens": self.records.tokens,
            "seconds": round(self.seconds, 4),
            "bytes_sent": self.records.sent.tolist(),
            "bytes_received": self.records.received.tolist(),
        }
        return end | {k: x for k, x in self._ended.items() if x is not None}

    def _save(self) -> None:
        with self._phase("checkpoint"):
            self.log.sync()
            extra = {
                "records": self.records.state(),
                "seconds": self.seconds,
                "positions": self.driver.positions(self.state),
                **origin(self.run),
                "ended": self._ended,
                "owed_evaluation": self._owed,
            }
            if self.run.engine.clock is not None:
                extra["clock"] = clock_state(self.run.engine.clock)
            fresh = self._evaluated_at == self.step
            folder, steps = self.run.job.workdir, self.checkpoints.steps()
            require_room(folder, self.state, steps)
            with written(folder, steps):
                self.checkpoints.save(
                    self.state,
                    extra=extra,
                    config=learnt(self.run.job.config),
                    metrics=self._metrics() if fresh else {},
                    method=self.run.job.method,
                )
            self._saved_at = self.step
        self._mark = time.perf_counter()

    def _metrics(self) -> dict[str, float]:
        """Those of a checkpoint of the step that was evaluated last."""
        return {best_by(self.run.job.config): self.evaluation.anchor}

    def _finish(self, interrupt: Interrupt) -> bool:
        """Land what is in flight, synchronise once more, save, and judge; whether it was judged."""
        job, saved = self.run.job, self.ended
        joined = self.run.exchange is not None and not self.ended
        if not self.ended:
            if job.by_rounds:
                self._advance(job.steps)  # a run that was saved below knows its last round again
            self._read()
            clock = self.run.engine.clock
            # Of the steps alone, as a replay of their records gives it: `finish` books its
            # exchanges.
            virtual = None if clock is None else clock.report().as_dict()
            if joined and job.saves_result:
                # The last synchronisation may wait for the others: nothing is lost by a kill there.
                self._save()
                self._saved_at = -1
            self.state = self.run.engine.finish(self.state, **self.faults.at_the_end)
            counters = self.state.counters
            self.records.sent = np.array(counters.bytes_sent)
            self.records.received = np.array(counters.bytes_received)
            self._ended, self._owed = {"virtual": virtual, "uncounted": self._left_out()}, True
            # A job that is killed here goes back with the others: they may not have saved yet.
            saved = job.saves_result and not joined
            if saved:
                self._save()
        self._evaluate(lambda: interrupt.requested, final=True)
        if not saved and (self._owed or job.saves_result):
            self._save()
        self.log.sync()
        if joined:
            more = {"linger_s": 0.0} if self._owed else {}
            rejoin.serve(self.run.engine, self.state, **more)
        return not self._owed

    def _left_out(self) -> bool | None:
        """True where the others counted nothing of this region's last exchanges; else None.

        A quorum need not hold every region: with rounds nothing follows from that. The same holds
        for a region that came in at the end: it has learnt nothing since.
        """
        if self.run.exchange is None or self.run.job.by_rounds or self.step == self._came_at:
            return None
        sends = int(self.state.counters.sends.sum())
        return self.run.exchange.never_counted(sends) or None

    @contextmanager
    def _phase(self, name: str):
        """Book the seconds of a phase; those of one inside another are not booked there, too."""
        started, around = time.perf_counter(), self._now
        self._now = name, started
        yield
        self._now, took = around, time.perf_counter() - started
        self._lasted[name] = took
        self._spent[name] += took
        if around is not None:
            self._spent[around[0]] -= took


def _next(step: int, every: int) -> int:
    """The first multiple of `every` after `step`."""
    return (step // every + 1) * every


def _mfu(run: Run, tokens_per_second: float) -> float | None:
    """Useful arithmetic as a share of this program's devices' peak; None = it is not known."""
    # No job needs it to meet the others.
    from lowcomm_jax.aot.targets import accelerator_of

    mesh = run.engine.plain.regions.mesh
    facts = accelerator_of(mesh.devices.flat[0])
    each = flops_per_token(run.model, run.job.data.seq_len)
    if facts is None or each is None:
        return None
    return tokens_per_second * each / (facts.flops * mesh.size)


def _driver(run: Run, fetching: Callable[[], Any]) -> Driver:
    if run.job.by_rounds:
        return RoundDriver(run, fetching)
    if not run.job.method.adapts:
        return FixedDriver(run, fetching)
    return AdaptiveDriver(run, fetching)
