"""Arithmetic of comparisons: intervals over seeds, crossings of a target, pairs.

Every interval is of 95 %.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.report.runlog import half_of_interval


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
      mean: None without a value.
      half: half the width of the 95 % interval (Student's t); None with fewer than two values.
      count: values it rests on.
    """

    mean: float | None
    half: float | None
    count: int

    @property
    def verdict(self) -> str:
        """In words, whether a difference with this interval has a sign."""
        if self.mean is None:
            return "nothing to compare"
        if self.half is None:
            return "one seed, no interval"
        if abs(self.mean) <= self.half:
            return "no evidence of a difference"
        return "lower" if self.mean < 0 else "higher"


def estimate(values: Sequence[float | None]) -> Estimate:
    """Mean and 95 % t-interval of the values; None stands for a seed that has none."""
    known = np.array([v for v in values if v is not None], float)
    if not len(known):
        return Estimate(None, None, 0)
    mean = float(known.mean())
    if len(known) == 1:
        return Estimate(mean, None, 1)
    error = known.std(ddof=1) / math.sqrt(len(known))
    return Estimate(mean, half_of_interval(error, len(known) - 1), len(known))


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Where a loss first is at most a target: `share` of the way between two evaluations."""

    before: int
    after: int
    share: float

    def of(self, values: Sequence[float]) -> float:
        """A quantity at the crossing, from its values at every evaluation (a straight line)."""
        low, high = values[self.before], values[self.after]
        return low + self.share * (high - low)


def crossing(losses: Sequence[float | None], target: float) -> Crossing | None:
    """The first crossing of `target` by the losses of a run's evaluations; None if never.

    Between two evaluations the loss is taken as a straight line. A loss that is not finite (None)
    counts as above every target.
    """
    for i, loss in enumerate(losses):
        if loss is not None and loss <= target:
            before = None if i == 0 else losses[i - 1]
            if before is None:
                return Crossing(i, i, 0.0)
            return Crossing(i - 1, i, (before - target) / (before - loss))
    return None


def paired(
    here: Mapping[Any, float | None], there: Mapping[Any, float | None]
) -> dict[Any, float | None]:
    """Differences `here - there` by seed; None where one of the two is missing."""
    return {
        seed: None if value is None or there.get(seed) is None else value - there[seed]
        for seed, value in here.items()
    }


def paired_share(
    here: Mapping[Any, float | None], there: Mapping[Any, float | None]
) -> dict[Any, float | None]:
    """Relative differences `here / there - 1` by seed; None where one is missing or zero."""
    return {
        seed: None if value is None or not there.get(seed) else value / there[seed] - 1
        for seed, value in here.items()
    }
