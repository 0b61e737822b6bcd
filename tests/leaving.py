"""Which fragments a schedule sends after a step, asked without a loop."""

from types import SimpleNamespace

import numpy as np

from lowcomm_jax.schedule.base import View


def leaves(schedule, step, counters, busy=(), rates=None, regions=1):
    """The fragments that leave, given those in flight; `rates` as in `Schedule.choose`."""
    flights = [(f"{p}@0", SimpleNamespace(fragment=p)) for p in busy]
    found = []
    for act in schedule.sends(step, View(counters, flights, regions)):
        several = len(act.fragments) > 1
        choose = schedule.choose
        found.append(choose(step, counters, act.fragments, rates) if several else act.fragments[0])
    return tuple(found)


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
