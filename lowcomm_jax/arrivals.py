"""What has arrived of everyone, and who was counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lowcomm_jax.carrying import Carrier
from lowcomm_jax.methods.base import Method
from lowcomm_jax.state import InFlight, TrainState, in_send_order


class Counted(NamedTuple):
    """Who was counted in an exchange.

    Attributes:
      fragment: that was sent; step: after which.
      number: of the fragment's sends, from 0.
      last: it is the last synchronisation of a run.
      counted_N: bool `[N]`, of all regions that exchanged it, ascending.
    """

    fragment: int
    step: int
    number: int
    last: bool
    counted_N: np.ndarray


class Arrivals:
    """Waits for payloads.

    Attributes:
      witness: is told of every arrival at once, before it lands; None = nobody is.
    """

    def __init__(self, carrier: Carrier):
        self._carrier = carrier
        self.witness: Callable[[Counted], None] | None = None

    def wait(
        self, state: TrainState, key: str, last: bool = False, postpone: bool = False
    ) -> tuple[TrainState, InFlight | None]:
        """`Carrier.finish`."""
        state, flight = self._carrier.finish(state, key, postpone)
        if flight is None:
            return state, None
        p, step = int(flight.fragment), int(flight.sent)
        number = state.clock.number(p, step)
        if self._carrier.always:
            state.clock.counted[p] = flight.takes_part.all()
        if self.witness is not None:
            self.witness(Counted(p, step, number, last, flight.takes_part.copy()))
        return state, flight


def due(state: TrainState, step: int) -> list[str]:
    """Keys of the payloads that land at this step at the latest, in the order of their sends."""
    flying = in_send_order(state.in_flight)
    return [key for key, f in flying if bool((f.waiting & (f.due <= step)).any())]


def hurried(state: TrainState, keys: Sequence[str], step: int) -> TrainState:
    """The state with these payloads due at this step at the latest."""
    flights = {key: state.in_flight[key] for key in keys}
    sooner = {k: dataclasses.replace(f, due=np.minimum(f.due, step)) for k, f in flights.items()}
    return state.replace(in_flight={**state.in_flight, **sooner})


def can_postpone(method: Method, state: TrainState, keys: Sequence[str], step: int) -> bool:
    """Whether these payloads may land later, so that training goes on where nobody can be reached.

    A region then has no part in them, until their fragments leave again. Not where it has an anchor
    of its own, nor where what has landed decides what is sent: all must decide alike.
    """
    schedule = method.schedule
    if not schedule.by_steps or method.anchors != "shared":
        return False
    leaving = schedule.sends(step, state.clock, frozenset(), lambda: None)
    flights = [state.in_flight[key] for key in keys]
    return not any(int(f.fragment) in leaving and f.sent < step for f in flights)
