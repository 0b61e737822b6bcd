"""One job per region: what an engine does when the other regions are other programs."""

from lowcomm_jax.jobs.carrier import BetweenJobs
from lowcomm_jax.jobs.restart import reconnect

__all__ = ["BetweenJobs", "reconnect"]
