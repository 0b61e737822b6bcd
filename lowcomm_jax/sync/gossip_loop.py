"""The loop of methods whose regions average in small groups (NoLoCo).

A fragment's rounds are counted by its sends. A round's groups follow from its number, so that the
state holds nothing beside the counters. Once anchors have moved, each region sends its own ahead to
the partners of the next round, and trains on. At the next boundary it waits for pseudo-gradients
only. On a mesh the bytes are booked so; between jobs `GossipJobLoop` sends the anchors.
"""

from __future__ import annotations

import numpy as np

from lowcomm_jax.exchange import Traffic, pair
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.rules.topology import Groups
from lowcomm_jax.state.train_state import InFlight, TrainState
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import SyncLoop


class GossipLoop(SyncLoop):
    """`SyncLoop` with a round's groups in sends and landings.

    Raises:
      ValueError: a leaf of role `average`, which asks for the mean of all regions.
    """

    def __init__(self, programs: RoundPrograms, weights: str | np.ndarray):
        super().__init__(programs, weights)
        if self._averaged:
            raise ValueError(
                f"leaves {self._averaged} of role 'average' need the mean of all regions, which "
                "gossip has not: give them the role 'local'"
            )
        self.topology = programs.method.topology
        self.exchange = programs.groups

    def groups(self, number: int) -> Groups:
        return self.topology.partition(self.topology.draw(number, self.total), self.total)

    def draw(self, state: TrainState, flight: InFlight) -> Draw:
        """The groups that exchanged this payload, as the landing program takes them."""
        # A fragment in flight is not sent again, so its round is that of its last send.
        return Draw(self.exchange.draw(int(state.counters.sends[int(flight.fragment)]) - 1))

    def update_anchor(self, state: TrainState, flight: InFlight, own=None, if_news: bool = False):
        """Move the anchors by the payloads of their groups; returns (state, device metrics)."""
        return super().update_anchor(state, flight, self.draw(state, flight), if_news)

    def anchors_ahead(self, state: TrainState, p: int, groups: Groups) -> Traffic:
        """Bytes `[R]` of fragment p's moved anchors on their way to the next round's groups."""
        del state
        return pair(4 * self.fragments.numel(p), np.ones(self.total, bool), groups)

    def log_landing(self, state, p, key, lands, staleness, step, values, events) -> None:
        """Book a landing, and the bytes of the moved anchors sent ahead to the next partners."""
        super().log_landing(state, p, key, lands, staleness, step, values, events)
        groups = self.groups(int(state.counters.sends[p]))
        traffic = self.anchors_ahead(state, p, groups)
        state.counters.bytes_sent += traffic.sent
        state.counters.bytes_received += traffic.received
        if traffic.nbytes:
            events[-1] = events[-1].sending_ahead(traffic, groups)
