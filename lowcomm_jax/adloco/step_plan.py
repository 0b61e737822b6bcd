"""Turns the batch a policy asks for into microbatches that fit into memory (AdLoCo's switch mode).

In: a requested batch, samples a region and step. Out: the samples of a step, and its microbatch.

Below the cap the microbatch grows in buckets, each of which compiles once. Requests between the cap
and n caps are cut to the cap, since two or three accumulated microbatches would cost as much time
as they save noise. Larger requests are accumulated from microbatches of the cap.

Differs from the published code: the microbatch is never the requested batch itself, and the number
of trainers changes nothing.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Switch:
    """Plans inner steps; a pure function of the requested batch, the same in every region.

    Attributes:
      cap: largest microbatch, at least `start`.
      start: smallest microbatch; the buckets are its doublings below the cap, and the cap.
      threshold: n >= 1; requests above n caps are accumulated.
    """

    cap: int
    start: int = 1
    threshold: float = 2.0

    def buckets(self) -> tuple[int, ...]:
        """Every microbatch that a step may have, ascending."""
        sizes = []
        size = self.start
        while size < self.cap:
            sizes.append(size)
            size *= 2
        return (*sizes, self.cap)

    def samples(self, requested: int) -> int:
        """Samples of a region's step for a requested batch, which is rounded or cut."""
        if requested > self.threshold * self.cap:
            return self.cap * math.ceil(requested / self.cap)
        return min(b for b in self.buckets() if b >= min(requested, self.cap))

    def microbatch(self, requested: int) -> int:
        """Samples in memory at once, of which the step's are a multiple."""
        return min(self.samples(requested), self.cap)

    def measured(self, requested: int, count: int) -> int:
        """Samples of each of `count` microbatches that are measured: all are about one step's."""
        most = self.samples(requested) / count
        return max([m for m in self.buckets() if m <= most], default=self.start)
