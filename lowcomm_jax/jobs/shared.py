"""What the regions of a run have in common: all that a newcomer needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lowcomm_jax.processes import fetch, team
from lowcomm_jax.state import TrainState

if TYPE_CHECKING:
    from lowcomm_jax.exchange import JobExchange

SHARED = ("anchor", "outer", "rate", "bases")  # fields of a state, besides the clock


def describe(state: TrainState) -> tuple[int, dict[str, np.ndarray], dict]:
    """What a newcomer needs: (step, arrays by name, what is in flight).

    The arrays are there in the first process of a job only.
    """
    # Here, since the rooms of checkpoints are built on the engine, which is built on this one.
    from lowcomm_jax.checkpoint.leaves import flight_records, named_leaves

    named: dict[str, Any] = {}
    for field in (*SHARED, "clock"):
        named |= named_leaves(field, getattr(state, field))
    arrays = fetch(named, here=team().leads)
    return int(state.clock.step), arrays, {"in_flight": flight_records(state)}


def moment(state: TrainState) -> tuple[int, str]:
    """(step, name): of the same name are only states in which the same payloads have landed.

    Of every fragment as many, that is: they land in the order in which they were sent.
    """
    landed = state.clock.sends.copy()
    for flight in state.in_flight.values():
        landed[int(flight.fragment)] -= not flight.moved
    return int(state.clock.step), ".".join(map(str, landed))


def give(exchange: JobExchange, state: TrainState) -> None:
    """Give the state to those who ask for one, if that is this region's to do."""
    if exchange.owes_state():
        exchange.give_state(*describe(state))
