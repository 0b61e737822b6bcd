"""Which anchor this region has had when, for others to compare theirs with."""

from __future__ import annotations

import weakref

import jax

from lowcomm_jax.fragments import Fragments
from lowcomm_jax.jobs.digest import fragment_digest, together
from lowcomm_jax.jobs.shared import moment
from lowcomm_jax.processes import whole
from lowcomm_jax.state import TrainState

_REMEMBERED = 32  # steps with sends or landings
Anchor = dict[str, jax.Array]
Terms = dict[str, jax.Array]


class Moments:
    """Remembers digests of the anchor, which stay on the device until somebody asks.

    Attributes:
      shared: all regions have one anchor, not each its own, of which there is nothing to compare.
      past: what `terms` gave, by `shared.moment`, ascending.
    """

    def __init__(self, shared: bool):
        self.shared = shared
        self.past: dict[tuple[int, str], Terms] = {}
        self._known: dict[int, tuple[list[weakref.ref], jax.Array]] = {}

    def sent(self, anchor: Anchor, fragments: Fragments, p: int) -> Terms:
        """What all regions must have alike where fragment p leaves (`exchange.between.terms`).

        Not of the other fragments: theirs may have landed in one region and still be awaited in
        another, which could not be reached for a while.
        """
        return {"anchor": self._digest(anchor, fragments, p)} if self.shared else {}

    def terms(self, anchor: Anchor, fragments: Fragments) -> Terms:
        """What all regions must have alike of an anchor of which the same has landed."""
        if not self.shared:
            return {}
        return {
            "anchor": together([self._digest(anchor, fragments, p) for p in range(len(fragments))])
        }

    def _digest(self, anchor: Anchor, fragments: Fragments, p: int) -> jax.Array:
        """Computed once, when the fragment's leaves have moved."""
        leaves = fragments.leaves(anchor, p)
        known, digest = self._known.get(p, ([], None))
        if len(known) == len(leaves) and all(x() is y for x, y in zip(known, leaves.values())):
            return digest
        digest = whole(fragment_digest(leaves, fragments.rows(p)))
        # Not the arrays themselves, which would outlive a state that is replaced.
        self._known[p] = [weakref.ref(x) for x in leaves.values()], digest
        return digest

    def forget(self) -> None:
        """What there was is not of the state that comes."""
        self.past = {}

    def note(self, state: TrainState, fragments: Fragments) -> None:
        """Remember this one."""
        if not self.shared:
            return
        # A new one each time: others may be reading the old one on their threads.
        self.past = {**self.past, moment(state): self.terms(state.anchor, fragments)}
        if len(self.past) > _REMEMBERED:
            del self.past[next(iter(self.past))]
