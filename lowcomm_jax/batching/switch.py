"""Turns the batch a policy asks for into microbatches that fit into memory (AdLoCo's switch mode).

In: a requested batch, samples a region and step. Out: a `Plan`, the microbatch and how many of them
a step accumulates; `counts` gives each region of uneven hardware its number of microbatches.
`find_cap` finds the largest microbatch for a memory budget.

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
    """How a region makes a step.

    Attributes:
      microbatch: samples in memory at once.
      accumulate: microbatches of a step, whose gradients are averaged.
    """

    microbatch: int
    accumulate: int

    @property
    def samples(self) -> int:
        """Samples of a region's step; other than requested, where the plan rounds or cuts."""
        return self.microbatch * self.accumulate


@dataclasses.dataclass(frozen=True)
class Switch:
    """Plans a region's steps.

    Attributes:
      cap: largest microbatch that fits into memory (`find_cap`).
      start: smallest microbatch; the buckets are its doublings below the cap, and the cap.
      threshold: n >= 1; requests above n caps are accumulated.
    """

    cap: int
    start: int = 1
    threshold: float = 2.0

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
            return Plan(self.cap, math.ceil(requested / self.cap))
        return Plan(min(b for b in self.buckets() if b >= min(requested, self.cap)), 1)


def counts(accumulate: int, shares: Sequence[float] | None, regions: int) -> tuple[int, ...]:
    """Microbatches of each region's step, where regions of uneven hardware share a step.

    Shares are rounded to whole microbatches, at least 1, so that a step of one microbatch a region
    cannot be shared unevenly.

    Args:
      accumulate: microbatches of a region's step, on average over regions.
      shares: R positive numbers in any unit; None = equal.
      regions: R.
    """
    if shares is None:
        return (accumulate,) * regions
    part_R = np.asarray(shares, np.float64) / np.sum(np.asarray(shares, np.float64))
    return tuple(max(1, round(float(x))) for x in part_R * accumulate * regions)


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
