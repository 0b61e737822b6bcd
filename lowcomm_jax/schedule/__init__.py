"""When each fragment leaves: pure host-side functions of the step and of reduced statistics."""

from lowcomm_jax.schedule.adaptive import Adaptive, syncs_per_period
from lowcomm_jax.schedule.arrivals import Arrivals
from lowcomm_jax.schedule.base import Schedule, Timing, delay_per_region
from lowcomm_jax.schedule.ranked import Ranked
from lowcomm_jax.schedule.staggered import Staggered

__all__ = [
    "Adaptive",
    "Arrivals",
    "Ranked",
    "Schedule",
    "Staggered",
    "Timing",
    "delay_per_region",
    "syncs_per_period",
]
