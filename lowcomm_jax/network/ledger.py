"""Counts the bytes that travel, per region, link and fragment."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowcomm_jax.network.routes import check, link_bytes


@dataclass
class Ledger:
    """Bytes that travelled, kept as counts of equal collectives and spread over links only when
    read.

    Attributes:
        regions: names of the regions.
        booked: {(fragment key, route, payload bytes of the members, members, listeners): times}.
    """

    regions: tuple[str, ...]
    booked: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def book(
        self,
        key: Hashable,
        route: str,
        nbytes_M: Sequence[float],
        members: Sequence[int],
        listeners: Sequence[int] = (),
    ) -> None:
        """Count a collective.

        Args:
            key: the fragment (or any label) it carried.
            route: one of `routes.ROUTES`.
            nbytes_M: bytes of each member's payload.
            members: ids of the regions that send.
            listeners: ids of the regions that only receive, see `routes`.

        Raises:
            ValueError: see `routes.check`.
        """
        members, listeners = tuple(members), tuple(listeners)
        sizes = tuple(float(b) for b in nbytes_M)
        entry = (key, route, sizes, members, listeners)
        if entry not in self.booked:
            check(route, sizes, members, len(self.regions), listeners)
        self.booked[entry] += 1

    def links(self, key: Hashable | None = None) -> dict[tuple[int, int], float]:
        """Give the bytes on each directed link, of one fragment or of all."""
        total: dict[tuple[int, int], float] = {}
        for (label, *collective), times in self.booked.items():
            if key is None or label == key:
                for pair, nbytes in link_bytes(*collective).items():
                    total[pair] = total.get(pair, 0.0) + nbytes * times
        return total

    def sent_R(self, key: Hashable | None = None) -> np.ndarray:
        """Give the payload bytes each region sent."""
        return self._sum(0, key)

    def received_R(self, key: Hashable | None = None) -> np.ndarray:
        """Give the payload bytes each region received."""
        return self._sum(1, key)

    def _sum(self, end: int, key: Hashable | None) -> np.ndarray:
        total_R = np.zeros(len(self.regions))
        for pair, nbytes in self.links(key).items():
            total_R[pair[end]] += nbytes
        return total_R
