"""`AnchorsAhead`: anchors of a region that gossips, on their way to the groups of their rounds.

A moved anchor leaves right after its landing, beside the inner steps (`send`). The fragment's next
payload takes it along (`take`): whoever is counted is counted with both (`rounds.early_payload`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lowcomm_jax.mesh.arrays import whole
from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.params.fragments import Fragments, take
from lowcomm_jax.rounds.loopback_exchange import LoopbackExchange
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.state.train_state import InFlight, TrainState, round_of

ANCHOR = "anchor"


class AnchorsAhead:
    """Sends this region's anchors before the payloads that they belong to.

    Attributes:
      keys: by fragment, of the anchor that was sent and that no payload has taken along.
    """

    def __init__(self, exchange: RemoteExchange | LoopbackExchange):
        self._exchange = exchange
        self.keys: dict[int, str] = {}

    def send(
        self,
        p: int,
        round: int,
        anchor: dict[str, jax.Array],
        fragments: Fragments,
        members: tuple[int, ...],
        step: int,
        takes_part: bool = True,
    ) -> None:
        """Send fragment p of an anchor.

        Args:
          round: number of the fragment's round that it is for, from 0.
          members: the group of that round.
          step, takes_part: as in `RemoteExchange.send_early`.
        """
        cut = _copied(fragments.leaves(anchor, p), fragments.rows(p))
        arrays = {f"{ANCHOR}/{k}": whole(x) for k, x in cut.items()}
        self.keys[p] = key = _key(p, round)
        self._exchange.send_early(key, arrays, members=members, step=step, takes_part=takes_part)

    def take(
        self, state: TrainState, flight: InFlight, fragments: Fragments, members: tuple[int, ...]
    ) -> str:
        """Key of the anchor that goes with a payload; sends it now if it was not sent ahead.

        That is so in a first round, and after a restart or an outage.
        """
        p, round_ = int(flight.fragment), round_of(state, flight)
        key = _key(p, round_)
        if self.keys.get(p, key) != key:
            self.drop()  # of another state
        if p not in self.keys:
            how = members, int(flight.sent), bool(flight.takes_part.any())
            self.send(p, round_, state.anchor, fragments, *how)
        return self.keys.pop(p)

    def drop(self) -> None:
        """Forget what was sent ahead: no round follows, or this state is another."""
        if self.keys:
            self._exchange.drop_early()
        self.keys = {}


def _key(p: int, round: int) -> str:
    """Key of an anchor: no number, as those of exchanges are."""
    return f"{p}.{round}.anchor"


@jax.jit
def _copied(leaves: dict[str, jax.Array], rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A fragment of an anchor, copied: the landing may donate the anchor before it is read."""
    return jax.tree.map(jnp.copy, take(unstow(leaves), rows))
