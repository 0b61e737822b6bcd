"""Schedules: which fragments leave after which inner step, and how long they travel.

In: the step, the counters in the training state (`SyncCounters`), and statistics that are the same
in every region. Out: what is to be done after the step, and in which order (`Schedule.acts`), the
codec's level, and what the schedule remembers. A schedule runs on the host and reads
reduced data alone, so that every region decides alike.

- `base`: the contract; and every fragment every H steps (DiLoCo, Streaming, and most others).
- `adaptive`: CoCoDC's choice by change rate. `rank_driven`: DiLoCoX's rank and period.
- `arrivals`: regions of different speed, each at its own steps.
- `two_levels`: the same, at local servers, which arrive at a global one.
- `timed`: rounds of a fixed time, in which regions of different speed make different numbers of
  steps.
- `learners`: independent learners, with a quorum and a grace window.
- `never`: no main exchange, for methods of channels alone.
- `pace`: when regions make inner steps, and are down. `timing`: what a network says.
"""

from lowcomm_jax.schedule.adaptive import Adaptive
from lowcomm_jax.schedule.arrivals import Arrivals
from lowcomm_jax.schedule.base import Admission, Schedule, Send, Staggered, delay_per_region
from lowcomm_jax.schedule.learners import Learners
from lowcomm_jax.schedule.never import Never
from lowcomm_jax.schedule.pace import Outage
from lowcomm_jax.schedule.rank_driven import Ranked
from lowcomm_jax.schedule.timed import Timed
from lowcomm_jax.schedule.timing import NetworkTiming, syncs_per_period
from lowcomm_jax.schedule.two_levels import TwoLevels

NAMES = {"arrivals": Arrivals, "staggered": Staggered}

__all__ = [
    "NAMES",
    "Adaptive",
    "Admission",
    "Arrivals",
    "Learners",
    "NetworkTiming",
    "Never",
    "Outage",
    "Ranked",
    "Schedule",
    "Send",
    "Staggered",
    "Timed",
    "TwoLevels",
    "delay_per_region",
    "syncs_per_period",
]
