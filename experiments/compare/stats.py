"""Arithmetic of comparisons: intervals over seeds, crossings of a target, pairs, tests.

Every interval is of 95 %.
"""

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
    return Estimate(mean, float(special.stdtrit(len(known) - 1, 0.975) * error), len(known))


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


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values of several tests: all below 0.05 are wrong together in 5 % at most.

    Holm (1979), "A simple sequentially rejective multiple test procedure": the k-th smallest of n
    is multiplied by n - k + 1, and is at least the adjusted one before it.
    """
    count, out, least = len(p), [1.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(count), key=p.__getitem__)):
        least = max(least, min(1.0, (count - rank) * p[i]))
        out[i] = least
    return out


def effect_size(values: Sequence[float]) -> float | None:
    """Hedges' g of paired differences: mean over standard deviation, times 1 - 3 / (4 n - 5).

    Hedges (1981); with n values there are n - 1 degrees of freedom. None without any spread, and
    with fewer than three values: of two the factor is 0.
    """
    if len(values) < 3:
        return None
    spread = float(np.std(values, ddof=1))
    if spread == 0:
        return None
    return float(np.mean(values)) / spread * (1 - 3 / (4 * len(values) - 5))


UNLIKE = 0.2  # p-value of an F test; a smaller one would find little in groups of three values


@dataclasses.dataclass(frozen=True)
class Margin:
    """A mean against a margin.

    Attributes:
      mean, half: of the 95 % t-interval.
      p: two-sided p-value that the true mean is the margin.
    """

    mean: float
    half: float
    p: float


def against_margin(
    groups: Mapping[Any, Sequence[float]], margin: float, least: int = 2
) -> dict[Any, Margin]:
    """t-tests of the means of several groups of values against a margin, with a pooled variance.

    The variance of a group is the larger of its own and the pooled one, sum_g sum_i (x_gi - m_g)^2
    over sum_g (n_g - 1). The t-distribution has sum_g (n_g - 1) degrees of freedom. Pooling gives
    groups of three seeds narrower intervals. No group gets a smaller variance than its own.

    A group whose variance is clearly larger than that of the others (F test at `UNLIKE`) tells how
    large it is by its own values alone: the t-distribution then has its n_g - 1 degrees of freedom.

    Args:
      groups: name -> values, such as paired differences by seed.
      least: values a group needs to be tested (at least 2); others are left out, also of the pool.
    """
    known = {name: np.array(x, float) for name, x in groups.items() if len(x) >= max(2, least)}
    freedom = sum(len(x) - 1 for x in known.values())
    if not freedom:
        return {}
    squares = {name: float(((x - x.mean()) ** 2).sum()) for name, x in known.items()}
    everyone = freedom, sum(squares.values()) / freedom
    found = {}
    for name, x in known.items():
        own = len(x) - 1, squares[name] / (len(x) - 1)
        others = freedom - own[0]
        rest = (sum(squares.values()) - squares[name]) / others if others else 0.0
        alone = others and special.fdtrc(own[0], others, own[1] / rest if rest else np.inf) < UNLIKE
        degrees, variance = own if alone else (freedom, max(own[1], everyone[1]))
        error = math.sqrt(variance / len(x))
        mean = float(x.mean())
        if error == 0:
            found[name] = Margin(mean, 0.0, 1.0 if mean == margin else 0.0)
            continue
        p = 2 * special.stdtr(degrees, -abs(mean - margin) / error)
        found[name] = Margin(mean, float(special.stdtrit(degrees, 0.975) * error), float(p))
    return found
