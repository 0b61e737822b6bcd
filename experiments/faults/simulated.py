"""Faults where one process simulates all regions: who takes part, and who rejoins when."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.faults.absences import Absences, Moment, ReplayedAbsences, ScriptedAbsences
from experiments.faults.happened import Happened
from experiments.train.assemble import Run
from experiments.train.starting import starting_params
from lowcomm_jax.recovery.rejoin_sim import rejoin_regions
from lowcomm_jax.state.train_state import TrainState


class SimulatedFaults:
    """Applies a run's faults, and its chance to take part, to a simulation.

    Args:
      run: where it is one of several jobs, nothing is simulated.
      state: first state of its engine.
    """

    def __init__(self, run: Run, state: Any):
        self._run = run
        self._fresh: TrainState | None = None
        self._began = Moment(0, None)  # the chunk of steps that is being trained
        job, here = run.job, run.exchange is None
        self._chance = job.config["participation"] if here else 1.0
        self._absences = _absences(job.faults, job.regions) if here else None
        if self._absences is not None and not job.method.adapts:
            self._absences.prepare_loop(run.engine.sync_loop(state))

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
        if self._absences is None:
            return target
        if self._absences.timed:
            return step + 1  # the clock stands still within a chunk
        return int(min(target, self._absences.next_return(step)))

    def end(self, step: int, state: Any) -> Any:
        """End the chunk: returning regions start from the anchor; returns the state."""
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


def _absences(faults, regions: int) -> Absences | None:
    if isinstance(faults, Happened):
        return ReplayedAbsences(faults)
    return ScriptedAbsences(faults, regions) if faults else None
