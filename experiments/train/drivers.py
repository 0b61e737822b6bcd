"""What the loop gives the engine to train on: batches of one size, or trainers whose batches grow.

Drivers count progress in *nominal steps*, of `regions x batch` samples each. With a fixed batch a
nominal step is an inner step. Evaluations, checkpoints, the learning-rate schedule and the end of
a run follow nominal steps, so that runs compare at equal tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from experiments.train.assemble import Run
from experiments.train.stopping import Stopping
from lowcomm_jax.adloco.state import AdaptiveState
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.state.train_state import TrainState, rounds_landed


class Driver(Protocol):
    """Counts a run's progress, and says what the engine is to train on.

    Attributes:
      waits: whether training waits for the device at times. The loop then reads the history at
        once, so that the records hold the time of their own steps.
    """

    waits: bool

    def progress(self, state: Any) -> int:
        """Nominal steps done."""

    def step(self, state: Any) -> int:
        """Inner steps done."""

    def calls(
        self, now: Callable[[], Any], count: int, stopping: Stopping
    ) -> Iterator[dict[str, Any]]:
        """Arguments of one call of the engine's `run` after the other, the state left out.

        Together they train `count` nominal steps, or until `stopping` says so. They end also where
        a state is `unsaved`, and where a wait for the other jobs was stopped for that.

        Args:
          now: gives the state that the last call has left.
        """

    def rate(self, row: Mapping[str, Any], skipped_R: np.ndarray) -> float:
        """Learning rate of a step, the mean over regions.

        Args:
          skipped_R: steps that each region has skipped so far; its optimizer did not count them.
        """

    def positions(self, state: Any) -> list[int] | dict[str, list[int]]:
        """Samples used of every stream, as a checkpoint records them."""


class FixedDriver:
    """One model, batches of one size, prepared ahead of their use."""

    def __init__(self, run: Run, fetching: Callable[[], Any]):
        """`fetching`: gives the context in which the driver waits for a batch."""
        self._run, self._fetching = run, fetching
        method = run.job.method
        reads = method.schedule.energy is not None or method.schedule.statistic != "none"
        self.waits = reads or run.exchange is not None
        self._batches: Iterator[Any] | None = None

    def progress(self, state: TrainState) -> int:
        return self.step(state)

    def step(self, state: TrainState) -> int:
        return int(state.counters.step)

    def calls(self, now: Callable[[], TrainState], count: int, stopping: Stopping):
        state = now()
        if self._batches is None:
            self._batches = self._open(state, self._run.job.steps - self.step(state))
        yield {"batches": self._next_batches(state, count, stopping)}

    def _open(self, state: TrainState, steps: int | None) -> Iterator[Any]:
        """The next so many batches; None = without end."""
        job, done = self._run.job, self.step(state)
        regions, rows = self._run.engine.own_batch(job.batch)
        return self._run.data.batches(
            done * job.batch,
            job.batch,
            steps=steps,
            regions=[job.here[i] for i in regions],
            rows=rows,
        )

    def _next_batches(self, state: TrainState, count: int, stopping: Stopping) -> Iterator[Any]:
        done = self.step(state)
        for step in range(done, done + count):
            if stopping.at(step, state) or stopping.unsaved:
                return
            yield self._batch(step + 1)

    def _batch(self, step: int) -> Any:
        """The next batch, for this step; faults that are due at it come first."""
        if self._run.fault_hooks is not None:
            self._run.fault_hooks.steps(step)
        with self._fetching():
            return next(self._batches)

    def rate(self, row: Mapping[str, Any], skipped_R: np.ndarray) -> float:
        return float(np.mean(self._run.rates(np.maximum(row["step"] - 1 - skipped_R, 0))))

    def positions(self, state: TrainState) -> list[int]:
        return [self.step(state) * self._run.job.batch] * len(self._run.job.here)


class RoundDriver(FixedDriver):
    """A region at a pace of its own that is a job: a nominal step is a tick, of the fastest region.

    A run of N ticks ends with the last round that opens until then, after as many steps of its own
    as that takes this region.
    """

    waits = True

    def __init__(self, run: Run, fetching: Callable[[], Any]):
        super().__init__(run, fetching)
        self._schedule = run.job.method.schedule
        self._rounds = self._schedule.rounds_by(run.job.steps)

    def progress(self, state: TrainState) -> int:
        landed, steps = rounds_landed(state), self._run.job.steps
        if landed >= self._rounds:
            return steps
        # Several rounds may open at the last tick: it is over when all of them have landed.
        return min(self._schedule.opens(landed - 1), steps - 1)

    def calls(self, now: Callable[[], TrainState], count: int, stopping: Stopping):
        state = now()
        goal = self._schedule.rounds_by(self.progress(state) + count)
        goal = min(max(goal, rounds_landed(state) + 1), self._rounds)
        batches = self._until(state, goal, stopping)
        yield {"batches": batches, "rounds": stopping.rounds(self._rounds)}

    def _until(self, state: TrainState, goal: int, stopping: Stopping) -> Iterator[Any]:
        """Batches until so many rounds have landed, or until it is time to stop."""
        if self._batches is None:
            self._batches = self._open(state, None)
        carrier = self._run.engine.sync_loop(state).carrier
        for step in itertools.count(self.step(state)):
            if carrier.landed >= goal or stopping.at(step, state) or stopping.unsaved:
                return
            carrier.last = stopping.rounds(self._rounds)
            yield self._batch(step + 1)

    def rate(self, row: Mapping[str, Any], skipped_R: np.ndarray) -> float:
        return super().rate({"step": min(row["step"], self._run.job.steps)}, skipped_R)


class AdaptiveDriver:
    """Trainers whose batches grow; samples are drawn as they are needed."""

    waits = True

    def __init__(self, run: Run, fetching: Callable[[], Any]):
        """`fetching`: see `FixedDriver`."""
        self._run, self._fetching = run, fetching
        self._nominal = run.job.regions * run.job.batch
        self._each: float | None = None  # seconds of a nominal step, of the last ones
        self._delayed = 0  # the last step that faults were asked for

    def progress(self, state: AdaptiveState) -> int:
        return state.samples // self._nominal

    def step(self, state: AdaptiveState) -> int:
        return state.step

    def calls(self, now: Callable[[], AdaptiveState], count: int, stopping: Stopping):
        state = now()
        goal = self.progress(state) + count
        while state.paused or self.progress(state) < goal:
            done = self.progress(state)
            until = min(goal, done + leader().broadcast_from_leader("piece", self._piece))
            begun = time.perf_counter()
            if not state.paused:
                self._delay(state)
            yield {
                "source": self._source,
                "samples": max(until * self._nominal - state.samples, 0),
                # Jobs stop at the end of a round, which they agree on.
                "rounds": None if self._run.exchange is None else 1,
            }
            state = now()
            jax.block_until_ready([t.state.inner for t in state.trainers.values()])
            self._each = (time.perf_counter() - begun) / max(self.progress(state) - done, 1)
            if stopping.at(state.step, state) or stopping.unsaved:
                return

    def _delay(self, state: AdaptiveState) -> None:
        """Let faults that are due in the rest of the round delay it."""
        if self._run.fault_hooks is not None:
            period = self._run.engine.period
            end = (state.step // period + 1) * period
            for step in range(max(state.step, self._delayed) + 1, end + 1):
                self._run.fault_hooks.steps(step)
            self._delayed = end

    def _piece(self) -> int:
        """Nominal steps to train before the driver checks for a signal: about a second of them."""
        return 1 if self._each is None else max(1, int(1 / self._each))

    def _source(self, trainer: int, start: int, count: int) -> Any:
        with self._fetching():
            return draw(self._run, trainer, start, count)

    def rate(self, row: Mapping[str, Any], skipped_R: np.ndarray) -> float:
        del skipped_R  # its batches and rates follow samples
        return self._run.job.inner.learning_rate * float(
            np.mean([t["rate"] for t in row["trainers"].values()])
        )

    def positions(self, state: AdaptiveState) -> dict[str, list[int]]:
        regions = self._run.job.regions
        return {str(number): [t.used] * regions for number, t in state.trainers.items()}


def draw(run: Run, trainer: int, start: int, count: int) -> Any:
    """Samples of a trainer's streams, see `AdaptiveEngine.run`; those that this process loads."""
    regions, _ = run.engine.plain.own_batch(count, cut=True)
    numbers = [run.job.here[i] for i in regions]
    return run.data.samples(start, count, trainer=trainer, regions=numbers)
