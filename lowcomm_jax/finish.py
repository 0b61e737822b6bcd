"""The end of training: drain what is in flight, then one last blocking synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lowcomm_jax import agenda, boundary
from lowcomm_jax.history import Event
from lowcomm_jax.state import TrainState, in_send_order, with_inner, without

AtTheEnd = Callable[[int], Sequence[bool]] | None

if TYPE_CHECKING:
    from lowcomm_jax.roundtrip import RoundTrips


def finish(
    trips: RoundTrips, state: TrainState, participants: AtTheEnd = None
) -> tuple[TrainState, list[Event]]:
    """Drain in send order, then synchronise every fragment once more, blocking.

    Where nothing is new momentum alone does not move the anchor, so that finishing twice is the
    same as once. With gossip the last synchronisation is one more round in groups, no meeting of
    all: every region ends on its own anchor, and the model is any of them or their mean.

    Args:
      participants: fragment -> bool `[R]`: who takes part in its last synchronisation; None =
        everyone.

    Returns:
      (state, events): every region's trained leaves equal its anchor (with gradient exchange:
      those of the regions that took part in the last step).

    Raises:
      exchange.Parted: regions that are jobs of their own end with different anchors.
    """
    events: list[Event] = []
    if trips.method.signal == "gradient":
        return state, events
    everyone, carrier = np.ones(trips.count, bool), trips.carrier
    carrier.insists = True
    try:
        state = agenda.settle(trips, state, everyone, events)
    finally:
        carrier.insists = False
    state, step = state.replace(clock=state.clock.copy()), int(state.clock.step)
    if not trips.schedule.land_after_send:
        state = trips.land_now(state, [k for k, _ in in_send_order(state.in_flight)], step, events)
    for p in range(len(trips.fragments)):
        mask = everyone if participants is None else np.asarray(participants(p), bool)
        state = _last_round(trips, state, p, step, mask, events)
    trips.carrier.ended(state, trips.fragments)
    return state, events


def _last_round(
    trips: RoundTrips, state, p: int, step: int, mask: np.ndarray, events: list[Event]
) -> TrainState:
    # A one-period method may have sent at this very step: land that, and those who sent are done.
    state = _drain(trips, state, p, step, events, sent=step)
    if not _all_adopted(trips, state, p, step):
        waits = any(f.fragment == p for f in state.in_flight.values())
        state = trips.send(state, p, step, mask, events)
        if waits:
            # One more boundary, so that the steps since the last one are not lost.
            state = boundary.cross(trips, state, p, step, mask, events)
    state = _drain(trips, state, p, step, events, sent=None)
    leaves = trips.fragments.leaves(state.inner.params, p)
    restarted = trips.programs.restart(leaves, trips.fragments.leaves(state.anchor, p))
    return with_inner(state, params={**state.inner.params, **restarted})


def _all_adopted(trips: RoundTrips, state: TrainState, p: int, step: int) -> bool:
    """Every region adopted the anchor as it is at this very step: also those in other jobs.

    Of regions in other groups a job does not know: there all those count that could have.
    """
    if trips.method.landing is not None:
        return False
    clock, apart = state.clock, trips.carrier.always and trips.method.topology is not None
    if apart:
        return bool(clock.last_sent[p] == step)
    return bool((clock.last_landed[p] == step).all() and clock.counted[p])


def _drain(trips: RoundTrips, state, p: int, step: int, events, sent: int | None) -> TrainState:
    """Land the payloads of fragment p sent at step `sent` (None: all), those who sent adopting."""
    for key, flight in in_send_order(state.in_flight):
        if flight.fragment != p or (sent is not None and flight.sent != sent):
            continue
        state, arrived = trips.arrivals.wait(state, key, last=sent is None)
        flight, own = state.in_flight[key], None
        if trips.method.takes_own_parts:
            own = boundary.own_parts(arrived, None)
        state, values = trips.move(state, arrived, own, if_news=True)
        state = trips.adopt(state, p, flight, flight.takes_part, step)
        state = state.replace(in_flight=without(state.in_flight, key))
        trips.log_landing(state, p, key, flight.takes_part, 0, step, values, events)
    return state
