"""One stage: the inner steps up to an event, then what happens at that event."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from lowcomm_jax.checks import participants_mask
from lowcomm_jax.gradient_run import run_gradient_steps
from lowcomm_jax.history import Event, with_pace
from lowcomm_jax.methods.base import Method
from lowcomm_jax.microbatches import Cut, first_step
from lowcomm_jax.network import VirtualClock, drive
from lowcomm_jax.roundtrip import RoundTrips
from lowcomm_jax.routed_steps import RoutedSteps
from lowcomm_jax.staging import Stage
from lowcomm_jax.state import TrainState

Participants = Callable[[int], Sequence[bool] | None] | None


@dataclasses.dataclass(frozen=True)
class StageRunner:
    """Runs the stages of one engine and books them on a clock, if there is one.

    `run` returns (state, metrics, events): metrics leaves `[R, capacity]`, or `[R]` with `single`
    (the stage has one step).
    """

    method: Method
    region_ids: jax.Array
    here: np.ndarray  # the same on the host: numbers of the regions in this job
    total: int
    routed: RoutedSteps | None = None  # where the loss function moves values between regions

    @property
    def count(self) -> int:
        return len(self.here)

    def _mask(self, participants: Participants, step: int) -> np.ndarray:
        """Bool `[R]` of the regions in this job, out of a mask of all regions."""
        return participants_mask(participants and participants(step), self.total)[self.here]

    def run(
        self,
        trips: RoundTrips,
        state: TrainState,
        stage: Stage,
        participants: Participants,
        single: bool,
        cut: Cut | None,
        clock: VirtualClock | None,
    ):
        done = int(state.clock.step)
        steps = range(done + 1, done + stage.steps + 1)
        if self.method.signal == "gradient":
            state, metrics, events, pace = self._gradient(
                trips, state, stage, participants, single, steps
            )
        else:
            active = self.active(steps, stage.capacity)
            trips.measurements.starts()
            inner, metrics = self.inner_steps(trips, state, stage, active, single, cut)
            mask = self._mask(participants, steps[-1])
            state, events = trips.after(state.replace(inner=inner), stage.steps, mask)
            pace = {} if active is None else {"active": active}
        if self.routed is not None:
            state, events = self.routed.book(state, steps, stage.batches, events)
        if clock is not None:
            book(clock, steps, events, pace)
        return state, with_pace(metrics, pace, single), events

    def inner_steps(
        self,
        trips: RoundTrips,
        state: TrainState,
        stage: Stage,
        active: np.ndarray | None,
        single: bool,
        cut: Cut | None,
    ):
        """The inner steps of a stage alone: (inner, metrics)."""
        n, programs = np.int32(stage.steps), trips.programs
        given = (state.inner, state.frozen, stage.batches, self.region_ids, active)
        if cut is None:
            return programs.block(*given, n, single=single)
        counts_R = cut.counts(stage.stride, self.count)
        inner, metrics = programs.accumulating(*given, counts_R, np.int32(stage.stride), n)
        return inner, first_step(metrics) if single else metrics

    def _gradient(self, trips, state, stage: Stage, participants, single: bool, steps: range):
        masks = [self._mask(participants, t) for t in steps]
        state, events, metrics = run_gradient_steps(
            trips.programs,
            state,
            stage.batches,
            self.region_ids,
            masks,
            None if trips.by_tokens else trips.weights,
            stage.capacity,
            single,
        )
        away = ~np.stack(masks, axis=1)
        return state, metrics, events, {"away": away} if away.any() else {}

    def active(self, steps: range, capacity: int) -> np.ndarray | None:
        """Bool `[R, S]`: which regions make an inner step; None = all of them, always."""
        schedule = self.method.schedule
        if not schedule.uneven:
            return None
        active = np.zeros((self.count, capacity), bool)
        for i, t in enumerate(steps):
            active[:, i] = schedule.active(t, self.count)
        return active


def book(clock: VirtualClock, steps: range, events: list[Event], pace: dict) -> None:
    """Let the virtual clock run through these steps and their events."""
    for i, t in enumerate(steps):
        masks = {name: mask[:, i] for name, mask in pace.items()}
        drive(clock, t, [e for e in events if e.step == t], **masks)
