"""Round trips of methods whose regions average in small groups.

A fragment's rounds are counted by its sends; a round's groups follow from its number, so nothing
beside the clock is remembered. Once anchors have moved they are sent ahead, to the partners of the
next round, while the regions train on: only the pseudo-gradients are then waited for.
"""

from __future__ import annotations

import numpy as np

from lowcomm_jax.exchange import GroupExchange
from lowcomm_jax.programs import Programs
from lowcomm_jax.roundtrip import RoundTrips
from lowcomm_jax.state import InFlight, TrainState, flight_key
from lowcomm_jax.topology import Gossip, Groups


class GossipTrips(RoundTrips):
    """`RoundTrips` with a round's groups in sends and landings.

    Raises:
      ValueError: a leaf of role `average`, which asks for the mean of all regions.
    """

    def __init__(self, programs: Programs, weights: str | np.ndarray, topology: Gossip):
        super().__init__(programs, weights)
        if self._averaged:
            raise ValueError(
                f"leaves {self._averaged} of role 'average' need the mean of all regions, which "
                "gossip has not: give them the role 'local'"
            )
        self.topology = topology
        self.exchange = GroupExchange(programs.recipe.regions, topology, programs.exchange.codec)

    def groups(self, number: int) -> Groups:
        total = self.carrier.total
        return self.topology.partition(self.topology.draw(number, total), total)

    def move(self, state: TrainState, flight: InFlight, own=None, if_news: bool = False):
        """Move the anchors by the payloads of their groups; returns (state, device metrics)."""
        # A fragment in flight is not sent again, so its round is that of its last send.
        p = int(flight.fragment)
        key = flight_key(p, int(flight.sent))
        draw = self.carrier.draw(self.exchange, int(state.clock.sends[p]) - 1, key)
        return super().move(state, flight, draw, if_news)

    def log_landing(self, state, p, key, lands, staleness, step, values, events) -> None:
        """Note a landing, and that the moved anchors are on their way to the next partners."""
        super().log_landing(state, p, key, lands, staleness, step, values, events)
        groups = self.groups(int(state.clock.sends[p]))
        traffic = self.carrier.anchors_ahead(4 * self.fragments.numel(p), groups)
        state.clock.bytes_sent += traffic.sent
        state.clock.bytes_received += traffic.received
        if traffic.nbytes:
            events[-1] = events[-1].sending_ahead(traffic, groups)


def round_trips(programs: Programs, weights: str | np.ndarray) -> RoundTrips:
    """The round trips of a method: among all regions, or in groups."""
    topology = programs.recipe.method.topology
    if topology is None:
        return RoundTrips(programs, weights)
    return GossipTrips(programs, weights, topology)
