"""Who averages with whom: seeded random groups that every region computes without a message.

A round's groups are one of a fixed family of partitions, drawn with (seed, round), so that a
compiled program can hold them all. The family consists of the rotations of one partition of the
points of a circle, under a relabelling drawn with the seed:

- pairs: the circle method of round-robin tournaments, a 1-factorisation. R even: R - 1 matchings
  (one point stays in the middle). R odd: R of them, and one region sits out. Every pair meets in
  exactly one matching, so that every pair is equally likely in every round.
- larger groups: the same rotations of a partition that was searched for one in which all pairs
  meet about equally often (exactly, where the search finds such a one). Where the group size does
  not divide R, the R mod n regions left over sit out, every region equally often.

Source: random disjoint groups of NoLoCo, arXiv 2506.10911.

Differs from its code: one of a few partitions instead of any permutation. The chance of every pair
is the same for pairs, and about the same for larger groups; the consensus depends on nothing else
(`consensus.Consensus`).

Only the generator's raw stream is used, which does not change between versions of NumPy.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from lowcomm_jax.refused import is_whole

__all__ = ["NAMES", "Gossip", "Groups", "member_table"]

Groups = list[tuple[int, ...]]
RELABEL, DRAW, SEARCH = 1, 2, 3  # what a stream of random numbers is for
STARTS, SWAPS = 10, 1000  # of the search for an even partition: beginnings; exchanges tried


@dataclasses.dataclass(frozen=True)
class Gossip:
    """Topology of a method: in every round each region averages with one small group.

    Attributes:
      group_size: n, from 2 to the number of regions.
      seed: of the draws; all regions must use the same.
      consensus: the outer rule's coefficients, which must keep the regions together (an
        `consensus.Consensus`); None = they are not checked.
      reads_own: whether the outer rule reads the region's own pseudo-gradient apart from its
        group's mean, as `own`. The anchor and outer state of a region that does not count (absent,
        not finite, of weight 0) then stay as they are; else they move with its group.
    """

    group_size: int = 2
    seed: int = 0
    consensus: Any = dataclasses.field(default=None, repr=False)
    reads_own: bool = False

    def violations(self, regions: int) -> list[str]:
        """What cannot work with this many regions, one line each with its fix."""
        problems = []
        if not _whole(regions, 2):
            problems.append(f"regions={regions}: gossip needs at least 2")
        elif not _whole(self.group_size, 2, regions):
            fix = f"groups of 2 to {regions} fit into {regions} regions"
            problems.append(f"group_size={self.group_size!r}: {fix}")
        elif self.consensus is not None:
            problems += self.consensus.violations(regions)
        if not _whole(self.seed, 0):
            problems.append(f"seed={self.seed!r}: use a whole number from 0")
        return problems

    def count(self, regions: int) -> int:
        """Number of partitions a round is drawn from."""
        return 1 if self.group_size == regions else _circle(regions, self.group_size)

    def draw(self, round: int, regions: int) -> int:
        """Number of the partition of a round, uniform over `count`."""
        return int(_stream(self.seed, round, DRAW).random_raw() % self.count(regions))

    def groups(self, round: int, regions: int) -> Groups:
        """The groups of a round, from 0: a pure function, the same wherever it is called.

        Engines have refused what `violations` lists; it is not looked for here.

        Returns:
          Tuples of region numbers, each ascending, that together hold every region once: floor(R /
          n) groups of n, and a tuple of one for each region that sits out.

        >>> sorted(len(group) for group in Gossip(2, seed=1).groups(3, regions=5))
        [1, 2, 2]
        """
        return self.partition(self.draw(round, regions), regions)

    def partition(self, number: int, regions: int) -> Groups:
        """The groups of partition `number`, as `groups` gives them."""
        circle = _circle(regions, self.group_size)
        base, label = _base(regions, self.group_size), _labels(self.seed, regions)
        turned = np.where(base < circle, (base + number) % circle, base)
        full = regions // self.group_size * self.group_size
        named = label[turned].tolist()
        size = self.group_size
        found = [tuple(sorted(named[i : i + size])) for i in range(0, full, size)]
        return sorted([*found, *((region,) for region in named[full:])])


def member_table(partition: Groups, group_size: int) -> np.ndarray:
    """Members of each region's group in ascending order, int32 `[R, n]`; -1 where there is none."""
    table = np.full((sum(map(len, partition)), group_size), -1, np.int32)
    for group in partition:
        table[list(group), : len(group)] = group
    return table


def _whole(value: object, low: int, high: float = np.inf) -> bool:
    return is_whole(value) and low <= value <= high


def _stream(seed: int, number: int, purpose: int) -> np.random.PCG64:
    """A stream of random numbers for (seed, number, purpose), to be read by `random_raw`."""
    return np.random.PCG64(np.random.SeedSequence((int(seed), int(number), purpose)))


def _circle(regions: int, group_size: int) -> int:
    """Points that rotate: all, or all but one where the groups leave nobody out."""
    return regions - 1 if regions % group_size == 0 else regions


@functools.lru_cache(maxsize=64)
def _labels(seed: int, regions: int) -> np.ndarray:
    """A random order of the regions, int64 `[R]`."""
    return np.argsort(_stream(seed, regions, RELABEL).random_raw(regions), kind="stable")


@functools.lru_cache(maxsize=64)
def _base(regions: int, group_size: int) -> np.ndarray:
    """The partition that is rotated, int64 `[R]`: groups one after the other, then the rest."""
    circle = _circle(regions, group_size)
    if group_size == 2:
        half = np.arange(1, (regions + 1) // 2)
        mirrored = np.stack([half, circle - half], axis=1).ravel()
        return np.append(mirrored, [0, circle] if regions % 2 == 0 else [0])
    return _even_partition(regions, group_size, circle)


def _even_partition(regions: int, group_size: int, circle: int) -> np.ndarray:
    """Search a partition in which all distances on the circle are about equally frequent.

    Rotations carry a pair of points to all pairs of the same distance, so these then meet equally
    often. Pairs with the middle point do so in any case.
    """
    stream = _stream(group_size, regions, SEARCH)
    best, least = np.arange(regions), np.inf
    for _ in range(STARTS):
        points = np.argsort(stream.random_raw(regions), kind="stable")
        now = _unevenness(points, group_size, circle)
        for i, j in (stream.random_raw((SWAPS, 2)) % regions).astype(int):
            points[[i, j]] = points[[j, i]]
            found = _unevenness(points, group_size, circle)
            if found > now:
                points[[i, j]] = points[[j, i]]
            now = min(now, found)
        if now < least:
            best, least = points, now
        if least == 0.0:
            break
    return best


def _unevenness(points: np.ndarray, group_size: int, circle: int) -> float:
    """Sum over pairs of points of (how often they meet in all rotations - its mean) squared."""
    full = len(points) // group_size * group_size
    groups_GxN = points[:full].reshape(-1, group_size)
    left, right = np.triu_indices(group_size, 1)
    a, b = groups_GxN[:, left].ravel(), groups_GxN[:, right].ravel()
    both = (a < circle) & (b < circle)
    apart = np.abs(a - b)[both]
    met = np.bincount(np.minimum(apart, circle - apart), minlength=circle // 2 + 1)[1:]
    pairs = np.full(met.shape, float(circle))
    if circle % 2 == 0:
        pairs[-1] = circle / 2
    often = met * circle / pairs
    return float((pairs * (often - (often * pairs).sum() / pairs.sum()) ** 2).sum())


NAMES = {"gossip": Gossip}
