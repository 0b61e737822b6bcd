"""The loop of methods that overlap a whole period (eager, naive delay, DiLoCoX).

At a round's boundary regions send the new pseudo-gradient first. Then the payload of the round
before moves the anchor, and every region that sent restarts from the anchor. A region that takes no
part keeps its values: its progress was not sent and is measured again at the next boundary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.history import Event
from lowcomm_jax.state.train_state import InFlight, TrainState, flight_key, without
from lowcomm_jax.sync.sync_loop import SyncLoop

PyTree = Any


class OnePeriodLoop(SyncLoop):
    """`SyncLoop` for schedules that land after the send (`Schedule.land_after_send`)."""

    def before_sends(self, state: TrainState, events: list[Event]) -> TrainState:
        """Do nothing: the anchor must not move before the new pseudo-gradient is measured."""
        del events
        return state

    def after_sends(
        self, state: TrainState, sent: Sequence[int], mask: np.ndarray, events: list[Event]
    ) -> TrainState:
        step = int(state.counters.step)
        mask = mask & self.schedule.senders(step, self.count)
        for p in sent:
            state = self.cross_boundary(state, p, step, mask, events)
        return state

    def in_flight_at(self, state: TrainState, step: int) -> frozenset[int]:
        """As `SyncLoop.in_flight_at`, without payloads that land at this step, after the send."""
        flights = state.in_flight.values()
        return frozenset(int(f.fragment) for f in flights if not bool((f.due <= step).all()))

    def decide(self, state: TrainState, events: list[Event]) -> TrainState:
        """As `SyncLoop.decide`; a payload sent at this boundary lands at the next one."""
        decided, step = self.conclusions(state, events), int(state.counters.step)
        if decided is None:
            return state
        state.counters.decided = decided
        then = np.full(self.count, self.schedule.next_send(step, state.counters), np.int64)
        flights = {
            k: dataclasses.replace(f, due=then) if f.sent == step else f
            for k, f in state.in_flight.items()
        }
        return state.replace(in_flight=flights)

    def cross_boundary(
        self, state: TrainState, p: int, step: int, mask: np.ndarray, events: list[Event]
    ) -> TrainState:
        """Land the payload of the previous round, just after this round's was sent.

        At the first boundary nothing is due: an empty payload lands, or, with
        `first_round="blocking"`, the one just sent.
        """
        fresh_key = flight_key(p, step)
        fresh = state.in_flight.get(fresh_key)
        late_key = next(
            (k for k, f in state.in_flight.items() if f.fragment == p and f.sent < step), None
        )
        if fresh is None and late_key is None:
            return state
        first = late_key is None and int(state.counters.sends[p]) == 1
        if first and self.method.schedule.first_round == "blocking":
            return self.land_now(state, [fresh_key], step, events)
        late, arrived, here = None, emptied(fresh), fresh
        if late_key is not None:
            state, arrived = self.collect(state, late_key, adopted=bool(mask.any()))
            late = here = state.in_flight[late_key]
        own = own_parts(late, fresh) if self.method.takes_own_parts else None
        state, values = self.update_anchor(state, arrived, own)
        lands = mask if fresh is not None else np.zeros_like(mask)
        state = self.adopt(state, p, here, lands, step)
        staleness = 0 if late is None else step - int(late.sent)
        self.log_landing(state, p, late_key, lands, staleness, step, values, events)
        return state.replace(in_flight=without(state.in_flight, late_key))


def own_parts(late: InFlight | None, fresh: InFlight | None) -> PyTree:
    """Extra arguments of the eager rule: own fresh and own late part with their shares.

    The fresh part that is added at one boundary is the late part that is subtracted at the next, so
    that differences between anchors do not add up.
    """
    some = late if fresh is None else fresh
    nothing = (some.payload, jnp.zeros_like(some.weight))  # a payload of weight 0 counts as 0

    def part(flight):
        return nothing if flight is None else (flight.payload, _shares(flight.weight))

    (own, weight), (own_late, weight_late) = part(fresh), part(late)
    return {"own": own, "own_late": own_late, "weight": weight, "weight_late": weight_late}


@jax.jit
def _shares(weight_R: jax.Array) -> jax.Array:
    """Share of each region in the mean; zeros when nobody is in it."""
    total = jnp.sum(weight_R)
    return jnp.where(total > 0, weight_R / jnp.where(total > 0, total, 1.0), 0.0)


def emptied(flight: InFlight | None) -> InFlight | None:
    """An empty payload: with all weights 0 its mean is 0."""
    if flight is None:
        return None
    return dataclasses.replace(flight, weight=jnp.zeros_like(flight.weight))
