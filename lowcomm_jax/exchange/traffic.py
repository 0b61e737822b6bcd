"""Counts the bytes that each region sends and receives, for the collective that the code runs.

In: bytes of one participant's payload, and bool `[R]`, who takes part. Out: `Traffic`, which the
virtual clock and the ledger book.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowcomm_jax.rules.topology import Groups


class Traffic(NamedTuple):
    """Bytes of one exchange.

    Attributes:
      route: name of the collective.
      nbytes: bytes of one participant's payload.
      sent, received: int64 `[R]`, bytes that leave and enter each region.
    """

    route: str
    nbytes: int
    sent: np.ndarray
    received: np.ndarray

    def plus(self, other: Traffic) -> Traffic:
        """Both exchanges together, under this one's route."""
        return Traffic(
            self.route,
            self.nbytes + other.nbytes,
            self.sent + other.sent,
            self.received + other.received,
        )


def two_shot(nbytes: int, takes_part_R: np.ndarray) -> Traffic:
    """Exchange slices, reduce, gather: each of m participants sends 2 (m-1)/m of the payload.

    Regions that take no part still receive the result (their anchor moves): nbytes, sent by the
    participants in equal shares.
    """
    part = np.asarray(takes_part_R, bool)
    m, absent = int(part.sum()), int((~part).sum())
    if m == 0:
        return _nothing("two_shot", nbytes, part)
    own = round(2 * nbytes * (m - 1) / m)
    # The result reaches absent regions from the participants, in shares that differ by a byte.
    share, rest = divmod(absent * nbytes, m)
    extra = share + (np.cumsum(part) <= rest)
    sent = np.where(part, own + extra, 0)
    received = np.where(part, own, nbytes)
    return Traffic("two_shot", nbytes, sent.astype(np.int64), received.astype(np.int64))


def in_halves(nbytes: int, takes_part_R: np.ndarray) -> Traffic:
    """`two_shot` between jobs, where a region that takes no part still reduces a slice.

    Args:
      nbytes: of a payload in as many equal slices as there are regions.
    """
    part = np.asarray(takes_part_R, bool)
    m = int(part.sum())
    if m == 0:
        return _nothing("two_shot", nbytes, part)
    each, others = nbytes // part.size, part.size - 1
    sent = each * others * (1 + part.astype(np.int64))
    received = each * (m - part + others)
    return Traffic("two_shot", nbytes, sent, received.astype(np.int64))


def all_gather(nbytes: int, takes_part_R: np.ndarray) -> Traffic:
    """Every participant sends its payload to every other region."""
    part = np.asarray(takes_part_R, bool)
    m = int(part.sum())
    if m == 0:
        return _nothing("all_gather", nbytes, part)
    sent = np.where(part, nbytes * (part.size - 1), 0)
    received = np.where(part, nbytes * (m - 1), nbytes * m)
    return Traffic("all_gather", nbytes, sent.astype(np.int64), received.astype(np.int64))


def pair(nbytes: int, takes_part_R: np.ndarray, groups: Groups) -> Traffic:
    """`all_gather` inside each group: each member sends to its partners only."""
    part = np.asarray(takes_part_R, bool)
    total = _nothing("pair", nbytes, part)
    for group in groups:
        members = list(group)
        _, _, sent, received = all_gather(nbytes, part[members])
        total.sent[members] = sent
        total.received[members] = received
    return total


def _nothing(route: str, nbytes: int, part: np.ndarray) -> Traffic:
    zeros = np.zeros(part.size, np.int64)
    return Traffic(route, nbytes, zeros, zeros.copy())
