"""Plans an inner step: from the batch a trainer asks for to microbatches of every region."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from lowcomm_jax.batching import BatchPolicy, Plan, Switch, counts


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A trainer's inner step.

    Attributes:
      batch: samples per region that it asks for.
      microbatch: samples in memory at once.
      counts_R: microbatches of every region.
    """

    batch: int
    microbatch: int
    counts_R: tuple[int, ...]

    @property
    def samples_R(self) -> np.ndarray:
        """Samples of every region, int64 `[R]`."""
        return np.asarray(self.counts_R, np.int64) * self.microbatch

    @property
    def stride(self) -> int:
        """Microbatches of a region that are read: those of the region that takes the most."""
        return max(self.counts_R)

    @property
    def read(self) -> int:
        """Samples of a region that are read."""
        return self.stride * self.microbatch

    @property
    def total(self) -> int:
        """Samples of all regions."""
        return sum(self.counts_R) * self.microbatch

    def of(self, regions: Sequence[int]) -> StepPlan:
        """The step of these regions."""
        return dataclasses.replace(self, counts_R=tuple(self.counts_R[r] for r in regions))


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans the steps of one engine; a pure function of the request, the same in every region.

    Attributes:
      switch: decides between a larger microbatch and more of them.
      policy: its `shares` say how regions share a step.
      regions: R.
    """

    switch: Switch
    policy: BatchPolicy
    regions: int

    def plan(self, batch: int) -> StepPlan:
        """The step of a requested batch (samples per region)."""
        found: Plan = self.switch.plan(batch)
        counts_R = counts(found.accumulate, self.policy.shares, self.regions)
        return StepPlan(batch, found.microbatch, counts_R)

    def microbatches(self) -> tuple[int, ...]:
        """Every size of a microbatch that a run may need."""
        if not self.policy.adapts:
            return (self.switch.plan(self.policy.start).microbatch,)
        return self.switch.buckets()

    def most(self) -> int:
        """Most microbatches of a region's step."""
        highest = math.ceil(self.policy.cap / self.switch.cap)
        largest = max(counts(highest, self.policy.shares, self.regions))
        return max(largest, max(self.plan(self.policy.start).counts_R))
