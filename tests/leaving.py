"""Which fragments a schedule sends after a step, asked without a loop."""

from types import SimpleNamespace

import numpy as np

from lowcomm_jax.schedule.base import View
from lowcomm_jax.state.train_state import SyncCounters


def leaves(schedule, step, counters, busy=(), rates=None, regions=1):
    """The fragments that leave, given those in flight; `rates` as in `Send.leaves`."""
    flights = [(f"{p}@0", SimpleNamespace(fragment=p)) for p in busy]
    stage = schedule.sends(step, View(counters, flights, regions))
    return tuple(act.leaves(rates) for act in stage)


def counters_of(schedule, regions):
    """The counters of a run that begins."""
    start = schedule.start() if schedule.remembers else {}
    return SyncCounters.start(schedule.fragments, regions, start)


def flight(fragment, sent, due, takes_part, moved=False):
    """A payload in flight, as a schedule sees it."""
    takes_part = np.array(takes_part)
    waiting = takes_part if takes_part.any() else np.ones_like(takes_part)
    due = np.broadcast_to(due, takes_part.shape)
    return SimpleNamespace(
        fragment=fragment,
        sent=sent,
        due=due,
        takes_part=takes_part,
        waiting=waiting,
        anchor_updated=moved,
    )
