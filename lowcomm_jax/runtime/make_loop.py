"""`job_loop`: chooses the loop over events of a job that is one region."""

from __future__ import annotations

from lowcomm_jax.methods.base import Method
from lowcomm_jax.runtime.arrival_job_loop import ArrivalJobLoop
from lowcomm_jax.runtime.job_delivery import JobDelivery
from lowcomm_jax.runtime.job_loop import GossipJobLoop, JobLoop, OnePeriodJobLoop
from lowcomm_jax.runtime.learner_job_loop import LearnerJobLoop
from lowcomm_jax.schedule import Arrivals, Learners
from lowcomm_jax.sync.round_programs import RoundPrograms


def job_loop(programs: RoundPrograms, weights, delivery: JobDelivery) -> JobLoop:
    """The loop of a method: in groups, in rounds of its own, one period late, or `JobLoop`."""
    method: Method = programs.method
    if method.topology is not None:
        return GossipJobLoop(programs, weights, delivery)
    if isinstance(method.schedule, Learners):
        return LearnerJobLoop(programs, weights, delivery)
    if isinstance(method.schedule, Arrivals):
        return ArrivalJobLoop(programs, weights, delivery)
    kind = OnePeriodJobLoop if method.schedule.land_after_send else JobLoop
    return kind(programs, weights, delivery)
