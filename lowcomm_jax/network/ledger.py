"""Counts the bytes that travel, per region, link and fragment, beside the analytic figure.

`payload_nbytes` takes them from the payload's buffers; a `Ledger` books them.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowcomm_jax.network.routes import check, link_bytes, sent_bytes


def payload_nbytes(payload: Any, copies: int = 1) -> int:
    """Sum the bytes of the buffers in a payload.

    Args:
        payload: nested dicts, lists, tuples of arrays (anything with `nbytes`), or None.
        copies: divide by this many (leaves with a leading region axis of that length).

    Raises:
        ValueError: the bytes do not divide by `copies`.
    """
    total = _buffer_bytes(payload)
    if total % copies:
        raise ValueError(
            f"payload of {total} bytes does not divide into {copies} regions: give the leading "
            "axis length"
        )
    return total // copies


def _buffer_bytes(payload: Any) -> int:
    if payload is None:
        return 0
    if isinstance(payload, Mapping):
        return sum(_buffer_bytes(v) for v in payload.values())
    if isinstance(payload, list | tuple):
        return sum(_buffer_bytes(v) for v in payload)
    return int(payload.nbytes)


@dataclass
class Ledger:
    """Bytes that travelled, kept as counts of equal collectives and spread over links only when
    read.

    Attributes:
        regions: names of the regions.
        booked: {(fragment key, route, payload bytes of the members, members, listeners): times}.
        analytic: {fragment key: bytes all regions together should have sent by the closed form}.
        control_R: control bytes sent by each region (headers, commit records).
    """

    regions: tuple[str, ...]
    booked: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    analytic: dict[Hashable, float] = field(default_factory=dict)
    control_R: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if self.control_R.shape != (len(self.regions),):
            self.control_R = np.zeros(len(self.regions))

    def book(
        self,
        key: Hashable,
        route: str,
        nbytes_M: Sequence[float],
        members: Sequence[int],
        announced: float | None = None,
        control_bytes: float = 0,
        listeners: Sequence[int] = (),
        times: int = 1,
    ) -> None:
        """Count equal collectives.

        Args:
            key: the fragment (or any label) it carried.
            route: one of `routes.ROUTES`.
            nbytes_M: bytes of each member's payload buffers, as counted.
            members: ids of the regions that send.
            announced: payload bytes of one member as the codec announces them (the analytic
                figure); None takes the mean of `nbytes_M`. Then the two figures differ only where
                the bytes on the links do not add up to the route's closed form.
            control_bytes: bytes exchanged with each partner besides the payload: members with all
                others, listeners with the members.
            listeners: ids of the regions that only receive, see `routes`.
            times: how many.

        Raises:
            ValueError: see `routes.check`.
        """
        members, listeners = tuple(members), tuple(listeners)
        sizes = tuple(float(b) for b in nbytes_M)
        entry = (key, route, sizes, members, listeners)
        if entry not in self.booked:
            check(route, sizes, members, len(self.regions), listeners)
        self.booked[entry] += times
        expected = sum(sizes) / len(sizes) if announced is None else float(announced)
        total = sent_bytes(route, expected, len(members), len(listeners)) * len(members)
        self.analytic[key] = self.analytic.get(key, 0.0) + total * times
        if control_bytes:
            partners = len(members) + len(listeners) - 1
            self.control_R[list(members)] += control_bytes * partners * times
            self.control_R[list(listeners)] += control_bytes * len(members) * times

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

    def fragments(self) -> dict[Hashable, tuple[float, float]]:
        """Give {fragment: (bytes counted, bytes analytic)} over all regions."""
        return {key: (float(self.sent_R(key).sum()), value) for key, value in self.analytic.items()}

    def discrepancy(self) -> float:
        """Give the largest relative difference of counted and analytic bytes over fragments.

        This checks a codec only where its collectives were booked with `announced`. A clock that
        `drive` advances books none: events know one size of a payload, the announced one. There
        this checks the bytes on the links against the closed form of their routes.
        """
        pairs = self.fragments().values()
        return max(
            (abs(counted - value) / value for counted, value in pairs if value > 0), default=0.0
        )

    def _sum(self, end: int, key: Hashable | None) -> np.ndarray:
        total_R = np.zeros(len(self.regions))
        for pair, nbytes in self.links(key).items():
            total_R[pair[end]] += nbytes
        return total_R
