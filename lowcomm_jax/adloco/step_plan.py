"""Turns the batch a policy asks for into microbatches that fit into memory (AdLoCo's switch mode).

In: a requested batch, samples a region and step. Out: a `StepPlan`, the microbatch and the samples
of a step.

Below the cap the microbatch grows in buckets, each of which compiles once. Requests between the cap
and n caps are cut to the cap, since two or three accumulated microbatches would cost as much time
as they save noise. Larger requests are accumulated from microbatches of the cap.

Differs from the published code: the microbatch is never the requested batch itself, and the number
of trainers changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple


class StepPlan(NamedTuple):
    """An inner step of a region.

    Attributes:
      batch: samples that were asked for.
      microbatch: samples in memory at once.
      samples: of the step, a multiple of them; not as asked for, where a plan rounds or cuts.
    """

    batch: int
    microbatch: int
    samples: int


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
        """Every microbatch that a plan may have, ascending."""
        sizes = []
        size = self.start
        while size < self.cap:
            sizes.append(size)
            size *= 2
        return (*sizes, self.cap)

    def plan(self, requested: int) -> StepPlan:
        """Plan steps for a requested batch (samples a region and step)."""
        if requested > self.threshold * self.cap:
            return StepPlan(requested, self.cap, self.cap * math.ceil(requested / self.cap))
        bucket = min(b for b in self.buckets() if b >= min(requested, self.cap))
        return StepPlan(requested, bucket, bucket)

    def measured(self, requested: int, count: int) -> int:
        """Samples of each of `count` microbatches that are measured: all are about one step's."""
        most = self.plan(requested).samples / count
        return max([m for m in self.buckets() if m <= most], default=self.start)
