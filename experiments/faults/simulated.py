"""Faults where one process simulates all regions: who takes part, and who rejoins when."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.faults.fault import ENDS, Moment, participants
from experiments.faults.happened import Happened
from experiments.faults.scripts import Faults
from experiments.train.assemble import Run
from experiments.train.starting import starting_params
from lowcomm_jax.recovery.rejoin import rejoin_regions
from lowcomm_jax.state.train_state import TrainState, with_inner
from lowcomm_jax.sync.carrier import Collected
from lowcomm_jax.sync.sync_loop import MeshCarrier, SyncLoop


class SimulatedFaults:
    """Applies a run's faults, and its chance to take part, to a simulation.

    Args:
      run: where it is one of several jobs, nothing is simulated but parameters that stop being
        finite.
      state: first state of its engine.
    """

    def __init__(self, run: Run, state: Any):
        self._run = run
        self._fresh: TrainState | None = None
        self._began = Moment(0, None)  # the chunk of steps that is being trained
        job, here = run.job, run.exchange is None
        self._chance = job.config["participation"] if here else 1.0
        self._absences = Absences(job.faults, job.regions) if here and job.faults else None
        self._not_finite = NotFinite.of(job.faults, job.here)
        if run.fault_hooks is not None:
            self._not_finite.witness = run.fault_hooks.not_finite
        if here and isinstance(job.faults, Happened) and not job.method.adapts:
            kept, everyone = job.faults.kept_own, np.arange(job.regions)
            run.engine.sync_loop(state).carrier = Replayed(
                lambda sent: ~np.isin(everyone, kept.get(sent, ()))
            )

    @property
    def participants(self):
        """See `Engine.run`: a pure function of (seed, step, script); None = everyone, always."""
        if self._absences is None and self._chance == 1:
            return None
        return self._takes_part

    @property
    def at_the_end(self) -> dict[str, Any]:
        """Arguments of the engine's `finish`."""
        if self._absences is None or self._run.job.method.adapts:
            return {}  # where batches grow nobody is away in the end (`checks`)
        return {"participants": self._absences.takes_part_at_the_end}

    def begin(self, step: int, target: int) -> int:
        """Begin a chunk of steps; returns the step at which it must end, at most `target`."""
        self._began = self._now(step)
        target = int(min(target, self._not_finite.next(step)))
        if self._absences is None:
            return target
        if self._absences.timed:
            return step + 1  # the clock stands still within a chunk
        return int(min(target, self._absences.next_return(step)))

    def end(self, step: int, state: Any) -> Any:
        """End the chunk: returning regions start from the anchor; returns the state."""
        state = self._not_finite.apply(state, self._began.step, step)
        if self._absences is None:
            return state
        comes_R = self._absences.returning(self._began, self._now(step))
        if not comes_R.any():
            return state
        engine = self._run.engine
        if self._fresh is None:
            self._fresh = engine.init(starting_params(self._run))
        return rejoin_regions(engine.sync_loop(state), state, self._fresh, comes_R)

    def _takes_part(self, step: int) -> np.ndarray:
        job = self._run.job
        drawn = np.random.default_rng((job.config["seed"], step)).random(job.regions) < self._chance
        if self._absences is None:
            return drawn
        return drawn & self._absences.takes_part(step, self._began)

    def _now(self, step: int) -> Moment:
        clock = self._run.engine.clock
        return Moment(step, None if clock is None else float(clock.now_R.max()))


class Replayed(MeshCarrier):
    """The carrier of a run that repeats one of jobs, of which some kept their own values.

    Args:
      adopted: step of a send -> bool `[R]`, who adopted the resulting anchor; of what lands at
        the end, too.
    """

    def __init__(self, adopted: Callable[[int], np.ndarray]):
        self._adopted = adopted

    def collect(
        self, loop: SyncLoop, state: TrainState, key: str, last: bool, adopts: bool
    ) -> tuple[TrainState, Collected]:
        """As on one mesh; in the state only those who adopted still take part."""
        state, collected = super().collect(loop, state, key, last, adopts)
        flight = collected.flight
        adopt_R = flight.takes_part & self._adopted(int(flight.sent))
        in_flight = {**state.in_flight, key: dataclasses.replace(flight, takes_part=adopt_R)}
        return state.replace(in_flight=in_flight), collected


class Absences:
    """Which regions are absent when, and when they return.

    Args:
      faults: of a script, or what happened in a run of jobs.

    Attributes:
      timed: whether absences go by time; the step at which one begins is then not known before.
    """

    def __init__(self, faults: Faults, regions: int):
        self._regions, self.timed = regions, False
        if isinstance(faults, Happened):
            self._up = lambda step, _: self._without(faults.left_out.get(step, ()))
            self._at_the_end = lambda fragment: faults.at_the_end.get(fragment, ())
            self._returns = [(float(one.step), one.region) for one in faults.rejoined]
            return
        kills = [fault for fault in faults if fault.kind in ENDS]
        dead = [fault.region for fault in kills if fault.end == math.inf]
        self.timed = any(fault.timed for fault in faults)
        self._up = participants(faults, regions)
        self._at_the_end = lambda fragment: dead  # every other fault is over then
        self._returns = [(fault.end, fault.region) for fault in kills]

    def takes_part(self, step: int, before: Moment) -> np.ndarray:
        """Bool `[R]`: who takes part in what is sent after `step`; `before`: when it began."""
        return self._up(step, before.seconds)

    def takes_part_at_the_end(self, fragment: int) -> np.ndarray:
        """Bool `[R]`: who takes part in the last synchronisation of a fragment."""
        return self._without(self._at_the_end(fragment))

    def next_return(self, step: int) -> float:
        """The first step after this one at which a region starts from the anchor; or infinity."""
        steps = [] if self.timed else [at for at, _ in self._returns if at > step]
        return min(steps, default=math.inf)

    def returning(self, before: Moment, now: Moment) -> np.ndarray:
        """Bool `[R]`: the regions that start from the anchor after one moment, up to another."""
        first, last = (m.seconds if self.timed else m.step for m in (before, now))
        return ~self._without([region for at, region in self._returns if first < at <= last])

    def _without(self, regions: Sequence[int]) -> np.ndarray:
        return ~np.isin(np.arange(self._regions), regions)


class NotFinite:
    """Applies the faults of kind `nan` to the regions that this process trains.

    All parameters of such a region become NaN after a step's events. It then learns nothing, and
    what it sends is not finite: no landing counts it, and it adopts the anchor with the next
    fragment.

    Args:
      when: step -> regions.
      here: the regions of this process, by row of its arrays.

    Attributes:
      witness: called with the step of every one that was applied.
    """

    def __init__(self, when: Mapping[int, Sequence[int]], here: Sequence[int]):
        rows = {step: [r in regions for r in here] for step, regions in when.items()}
        self._rows = {step: np.array(mask) for step, mask in rows.items() if any(mask)}
        self.witness: Callable[[int], None] | None = None

    @classmethod
    def of(cls, faults: Faults, here: Sequence[int]) -> NotFinite:
        """Those of a script, or of what happened."""
        if isinstance(faults, Happened):
            return cls(faults.not_finite, here)
        when: dict[int, list[int]] = {}
        for fault in faults:
            if fault.kind == "nan":
                when.setdefault(fault.step, []).append(fault.region)
        return cls(when, here)

    def next(self, step: int) -> float:
        """The first step after this one at which something is applied; or infinity."""
        return min((at for at in self._rows if at > step), default=math.inf)

    def apply(self, state: TrainState, before: int, now: int) -> TrainState:
        """Apply what is due after the steps from `before` on, up to `now`; the events are done."""
        for step, mask_R in self._rows.items():
            if before < step <= now:
                state = _with_nan(state, mask_R)
                if self.witness is not None:
                    self.witness(step)
        return state


def _with_nan(state: TrainState, mask_R: np.ndarray) -> TrainState:
    return with_inner(state, params=_spoilt(state.inner.params, mask_R))


def _spoilt(params, mask_R: np.ndarray):
    """NaN in these regions' rows of every array `[R, ...]`, which stay where they are."""

    def spoil(x: jax.Array) -> jax.Array:
        mask = mask_R.reshape(-1, *(1,) * (x.ndim - 1))
        return jax.device_put(jnp.where(mask, jnp.asarray(jnp.nan, x.dtype), x), x.sharding)

    return jax.tree.map(spoil, params)
