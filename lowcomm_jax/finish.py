"""The end of training: drain what is in flight, then one last blocking synchronisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax import boundary
from lowcomm_jax.history import Event
from lowcomm_jax.state import TrainState, in_send_order, with_inner, without

if TYPE_CHECKING:
    from lowcomm_jax.roundtrip import RoundTrips


def finish(trips: RoundTrips, state: TrainState) -> tuple[TrainState, list[Event]]:
    """Drain in send order, then synchronise every fragment once more, blocking.

    A fragment with nothing new (every region adopted the anchor at this very step) is left alone:
    momentum alone must not move the anchor.

    Returns:
      (state, events): every region's trained leaves equal its anchor.
    """
    events: list[Event] = []
    if trips.method.signal == "gradient":
        return state, events
    state, step = state.replace(clock=state.clock.copy()), int(state.clock.step)
    if not trips.schedule.land_after_send:
        state = trips.land_now(state, [k for k, _ in in_send_order(state.in_flight)], step, events)
    for p in range(len(trips.fragments)):
        state = _last_round(trips, state, p, step, events)
    return state, events


def _last_round(trips: RoundTrips, state, p: int, step: int, events: list[Event]) -> TrainState:
    everyone = np.ones(trips.count, bool)
    adopted = bool((state.clock.last_landed[p] == step).all())
    if not (adopted and trips.method.landing is None):
        state = trips.send(state, p, step, everyone, events)
        if trips.schedule.land_after_send:
            # One more boundary, so that the steps since the last one are not lost.
            state = boundary.cross(trips, state, p, step, everyone, events)
    for key, flight in in_send_order(state.in_flight):
        if flight.fragment != p:
            continue
        own = None
        if trips.method.anchors == "per_region":
            own = boundary.own_parts(flight, None)
        state, values = trips.move(state, p, flight.payload, flight.weight, own)
        state = state.replace(in_flight=without(state.in_flight, key))
        trips.log_landing(state, p, key, everyone, 0, step, values, events)
    return _adopt_everywhere(trips, state, p)


def _adopt_everywhere(trips: RoundTrips, state: TrainState, p: int) -> TrainState:
    params = dict(state.inner.params)
    for name in trips.fragments.leaves(state.anchor, p):
        local = params[name]
        anchor = jnp.broadcast_to(state.anchor[name], local.shape).astype(local.dtype)
        params[name] = jax.device_put(anchor, local.sharding)
    return with_inner(state, params=params)
