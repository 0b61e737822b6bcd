"""Turns the batch a policy asks for into microbatches that fit into memory (AdLoCo's switch mode).

In: a requested batch, samples a region and step. Out: a `Plan`, the microbatch and how many of them
a step of each region accumulates; regions of uneven hardware may have different numbers. `find_cap`
finds the largest microbatch for a memory budget.

Below the cap the microbatch grows in buckets, each of which compiles once. Requests between the cap
and n caps are cut to the cap, since two or three accumulated microbatches would cost as much time
as they save noise. Larger requests are accumulated from microbatches of the cap.

Differs from the published code: the microbatch is never the requested batch itself, and the number
of trainers changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Plan:
    """An inner step.

    Attributes:
      batch: samples per region that were asked for.
      microbatch: samples in memory at once.
      counts_R: microbatches of every region, whose gradients are averaged.
    """

    batch: int
    microbatch: int
    counts_R: tuple[int, ...]

    @property
    def samples_R(self) -> np.ndarray:
        """Samples of every region, int64 `[R]`; not as asked for, where a plan rounds or cuts."""
        return np.asarray(self.counts_R, np.int64) * self.microbatch

    @property
    def read(self) -> int:
        """Samples of a region that are read: those of the region that takes the most."""
        return max(self.counts_R) * self.microbatch

    @property
    def total(self) -> int:
        """Samples of all regions."""
        return sum(self.counts_R) * self.microbatch

    def of(self, regions: Sequence[int]) -> Plan:
        """The step of these regions."""
        return dataclasses.replace(self, counts_R=tuple(self.counts_R[r] for r in regions))


@dataclasses.dataclass(frozen=True)
class Switch:
    """Plans inner steps; a pure function of the requested batch, the same in every region.

    Attributes:
      cap: largest microbatch that fits into memory (`find_cap`).
      start: smallest microbatch; the buckets are its doublings below the cap, and the cap.
      threshold: n >= 1; requests above n caps are accumulated.
      shares: R positive numbers in any unit, how regions of uneven hardware share a step; None =
        equally. They are rounded to whole microbatches, at least 1, so that a step of one
        microbatch a region cannot be shared unevenly.
      regions: R.
    """

    cap: int
    start: int = 1
    threshold: float = 2.0
    shares: Sequence[float] | None = None
    regions: int = 1

    def violations(self) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        found = [
            f"{name}={value}: a whole number of samples, at least 1, is needed"
            for name, value in (("cap", self.cap), ("start", self.start))
            if not isinstance(value, int) or value < 1
        ]
        if not found and self.cap < self.start:
            found.append(
                f"the memory cap of {self.cap} samples is below the start batch of {self.start}: "
                f"start with {self.cap}, or give more memory"
            )
        if not (math.isfinite(self.threshold) and self.threshold >= 1):
            found.append(f"threshold={self.threshold}: a number, at least 1, is needed")
        return found

    def buckets(self) -> tuple[int, ...]:
        """Every microbatch that a plan may have, ascending."""
        sizes = []
        size = self.start
        while size < self.cap:
            sizes.append(size)
            size *= 2
        return (*sizes, self.cap)

    def plan(self, requested: int) -> Plan:
        """Plan steps for a requested batch (samples a region and step)."""
        if requested > self.threshold * self.cap:
            return Plan(requested, self.cap, self._counts(math.ceil(requested / self.cap)))
        bucket = min(b for b in self.buckets() if b >= min(requested, self.cap))
        return Plan(requested, bucket, self._counts(1))

    def most(self, requested: int) -> int:
        """Most microbatches of a region's step, of all batches up to this one."""
        return max(self._counts(math.ceil(requested / self.cap)))

    def _counts(self, accumulate: int) -> tuple[int, ...]:
        """Microbatches of each region's step, of so many on average."""
        if self.shares is None:
            return (accumulate,) * self.regions
        part_R = np.asarray(self.shares, np.float64) / np.sum(np.asarray(self.shares, np.float64))
        return tuple(max(1, round(float(x))) for x in part_R * accumulate * self.regions)


def find_cap(nbytes: Callable[[int], int], budget: int, start: int = 1, limit: int = 65536) -> int:
    """Find the largest microbatch whose step fits into a memory budget.

    Doubling, then bisection: about 2 log2(cap / start) calls of `nbytes`. Each call compiles a step
    where `nbytes` asks the compiler (`adaptive.step_memory.step_bytes`); none is run.

    Args:
      nbytes: microbatch -> bytes of a device; must grow with the microbatch.
      budget: bytes of a device that may be used.
      start: the smallest; the answer is a multiple of it.
      limit: the largest to ask for.

    Raises:
      ValueError: not even `start` fits, or it is above `limit`.
    """
    if start > limit:
        raise ValueError(f"start={start} is above limit={limit}: nothing may be asked for")
    if (least := nbytes(start)) > budget:
        raise ValueError(
            f"a microbatch of {start} needs {least} bytes of a device and the budget is {budget}: "
            "give more memory, a smaller model, or a smaller start batch"
        )
    fits, multiples = 1, limit // start
    while 2 * fits <= multiples and nbytes(2 * fits * start) <= budget:
        fits *= 2
    low, high = fits, min(2 * fits, multiples + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if nbytes(middle * start) <= budget else (low, middle)
    return low * start
