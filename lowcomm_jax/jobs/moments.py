"""Which anchor this region has had when, for others to compare theirs with."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from lowcomm_jax.jobs.digest import anchor_digest
from lowcomm_jax.jobs.shared import moment
from lowcomm_jax.processes import whole
from lowcomm_jax.state import TrainState

_REMEMBERED = 32  # steps with sends or landings


class Moments:
    """Remembers digests of the anchor, which stay on the device until somebody asks.

    Attributes:
      shared: all regions have one anchor, not each its own, of which there is nothing to compare.
      past: what `terms` gave, by `shared.moment`, ascending.
    """

    def __init__(self, shared: bool):
        self.shared = shared
        self.past: dict[tuple[int, str], dict[str, jax.Array]] = {}
        self._leaves: list[weakref.ref] = []
        self._digest: jax.Array | None = None

    def terms(self, anchor: dict[str, Any]) -> dict[str, jax.Array]:
        """What all regions must have alike of an anchor (`exchange.between.terms`).

        Its digest is computed once, when it has moved.
        """
        if not self.shared:
            return {}
        leaves = list(anchor.values())
        known = [leaf() for leaf in self._leaves]
        if len(leaves) != len(known) or any(x is not y for x, y in zip(leaves, known)):
            self._digest = whole(anchor_digest(anchor))
            # Not the arrays themselves, which would outlive a state that is replaced.
            self._leaves = [weakref.ref(x) for x in leaves]
        return {"anchor": self._digest}

    def forget(self) -> None:
        """What there was is not of the state that comes."""
        self.past = {}

    def note(self, state: TrainState) -> None:
        """Remember this one."""
        if not self.shared:
            return
        # A new one each time: others may be reading the old one on their threads.
        self.past = {**self.past, moment(state): self.terms(state.anchor)}
        if len(self.past) > _REMEMBERED:
            del self.past[next(iter(self.past))]
