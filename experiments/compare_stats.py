"""The arithmetic of a comparison: intervals over seeds, steps to a target, paired differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special


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
        """What a difference with this interval says."""
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
    return Estimate(mean, float(special.stdtrit(len(known) - 1, 0.975) * error), len(known))


def steps_to(evals: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """Inner steps until the anchor's evaluation loss first is at most `target`; None if never.

    Between two evaluations the loss is taken as a straight line. A loss that is not finite counts
    as above every target.
    """
    before = None
    for record in evals:
        loss, step = record["anchor"], record["step"]
        if loss is not None and loss <= target:
            if before is None or before["anchor"] is None:
                return float(step)
            share = (before["anchor"] - target) / (before["anchor"] - loss)
            return before["step"] + share * (step - before["step"])
        before = record
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
