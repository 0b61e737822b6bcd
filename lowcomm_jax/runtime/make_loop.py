"""`job_loop`: chooses the loop over events of a job that is one region."""

from __future__ import annotations

import numpy as np

from lowcomm_jax.runtime import job_carrier
from lowcomm_jax.runtime.arrival_job_loop import ArrivalJobLoop
from lowcomm_jax.runtime.job_carrier import JobCarrier
from lowcomm_jax.runtime.job_delivery import JobDelivery
from lowcomm_jax.runtime.learner_job_loop import LearnerJobLoop
from lowcomm_jax.runtime.round_job_loop import RoundJobLoop
from lowcomm_jax.schedule import Arrivals, Learners
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import SyncLoop


def job_loop(programs: RoundPrograms, weights: str | np.ndarray, delivery: JobDelivery) -> SyncLoop:
    """The loop of a method: in rounds of its own, or the one of its schedule's acts."""
    schedule, carrier = programs.method.schedule, JobCarrier(delivery)
    if isinstance(schedule, Learners):
        return LearnerJobLoop(programs, weights, carrier)
    if isinstance(schedule, Arrivals):
        return ArrivalJobLoop(programs, weights, carrier)
    return SyncLoop(programs, weights, carrier)


def reconnect(loop: SyncLoop, state: TrainState) -> None:
    """Go on with what a restored state has in flight (`Engine.reconnect`)."""
    if isinstance(loop, RoundJobLoop):
        loop.reconnect(state)
    else:
        job_carrier.reconnect(loop, state)
