"""What has arrived of everyone, and who was counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lowcomm_jax.carrying import Carrier
from lowcomm_jax.state import InFlight, TrainState, in_send_order


class Counted(NamedTuple):
    """Who was counted in an exchange.

    Attributes:
      fragment: that was sent; step: after which.
      number: of the fragment's sends, from 0.
      last: it is the last synchronisation of a run.
      counted_N: bool `[N]`, of all regions that exchanged it, ascending.
      adopted: whether regions of this job that were counted adopt it.
    """

    fragment: int
    step: int
    number: int
    last: bool
    counted_N: np.ndarray
    adopted: bool


class Arrivals:
    """Waits for payloads.

    Attributes:
      witness: is told of every arrival at once, before it lands, if it is known (`Carrier.hears`);
        None = nobody is.
      adopting: step of a send -> bool `[R]`: who adopts what comes of it; None = who took part.
    """

    def __init__(self, carrier: Carrier):
        self._carrier = carrier
        self.witness: Callable[[Counted], None] | None = None
        self.adopting: Callable[[int], np.ndarray] | None = None

    def adopters(self, flight: InFlight) -> np.ndarray:
        """Bool `[R]`: who adopts it, of those who took part."""
        if self.adopting is None:
            return np.ones_like(flight.takes_part)
        return self.adopting(int(flight.sent))

    def wait(
        self, state: TrainState, key: str, last: bool = False, adopted: bool = True
    ) -> tuple[TrainState, InFlight]:
        """`Carrier.finish`; last, adopted: see `Counted`."""
        heard = self._carrier.hears(key)
        state, flight = self._carrier.finish(state, key)
        p, step = int(flight.fragment), int(flight.sent)
        number = state.clock.number(p, step)
        if self._carrier.always:
            state.clock.counted[p] = flight.takes_part.all()
        if self.witness is not None and heard:
            counted = flight.takes_part.copy()
            self.witness(Counted(p, step, number, last, counted, adopted))
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
