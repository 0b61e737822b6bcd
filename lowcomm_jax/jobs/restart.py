"""A job that starts again where its checkpoint was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowcomm_jax.state import TrainState, in_send_order

if TYPE_CHECKING:
    from lowcomm_jax.roundtrip import RoundTrips


def expect(trips: RoundTrips, state: TrainState) -> None:
    """Wait, as a listener, for what others have in flight."""
    trips.carrier.silent = True
    try:
        reconnect(trips, state)
    finally:
        trips.carrier.silent = False


def reconnect(trips: RoundTrips, state: TrainState) -> None:
    """Send off what is in flight once more: its first way ended with the job that sent it.

    Raises:
      ValueError: the state is of a checkpoint that does not tell what comes back where this region
        is not counted.
    """
    for key, flight in in_send_order(state.in_flight):
        if flight.moved:
            continue
        if flight.takes_part.any() and flight.kept is None:
            raise ValueError(
                f"payload {key!r} is in flight without the codec's state from before it: go on "
                "with the version of this package that saved it"
            )
        p, number = int(flight.fragment), state.clock.sends_until(int(flight.sent))
        exchange, groups = trips.programs.exchange, trips.groups(int(state.clock.sends[p]) - 1)
        how = (groups, exchange.at(int(flight.level)), trips.fragments)
        trips.carrier.start(key, number, flight, state.anchor, *how, again=True)
