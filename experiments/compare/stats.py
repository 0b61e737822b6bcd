"""Arithmetic of comparisons: intervals over seeds, crossings of a target, pairs, tests.

Every interval is of 95 %.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Spread:
    """What variances of small groups are like: `variance` times `degrees` over a chi-square.

    Attributes:
      variance: s0^2, the one that a group without values of its own would be given.
      degrees: d0, for how many degrees of freedom it counts; infinite where the groups' variances
        differ no more than they would by chance.
      known: degrees of freedom of all groups that it is known from; no test has more.
    """

    variance: float
    degrees: float
    known: int


def spread_of(groups: Iterable[Sequence[float]]) -> Spread:
    """The prior of the groups' variances, from their logarithms' mean and variance.

    Smyth (2004), "Linear models and empirical Bayes methods", section 6.2. A group's logarithm of
    s^2 with d degrees of freedom has the mean log sigma^2 + digamma(d / 2) - log(d / 2), and varies
    by trigamma(d / 2) around it. What they vary more, their true variances do.

    Args:
      groups: values, such as paired differences by seed; at least two each.
    """
    known = [np.array(x, float) for x in groups]
    degrees = np.array([len(x) - 1 for x in known], float)
    variances = np.array([x.var(ddof=1) for x in known])
    if not len(known) or not variances.any():
        return Spread(0.0, math.inf, int(degrees.sum()))
    # A variance of 0, as of three equal values, has no logarithm.
    variances = np.maximum(variances, 1e-5 * np.median(variances[variances > 0]))
    if len(known) == 1:
        return Spread(float(variances[0]), 0.0, int(degrees[0]))
    half = degrees / 2
    logs = np.log(variances) - special.digamma(half) + np.log(half)
    beyond = float(logs.var(ddof=1) - special.polygamma(1, half).mean())
    if beyond <= 0:
        pooled = float(degrees @ variances / degrees.sum())
        return Spread(pooled, math.inf, int(degrees.sum()))
    prior = _inverse_trigamma(beyond)
    centre = float(np.exp(logs.mean() + special.digamma(prior) - math.log(prior)))
    return Spread(centre, 2 * prior, int(degrees.sum()))


def _inverse_trigamma(value: float) -> float:
    """The x > 0 with trigamma(x) = value, by Newton's method on 1 / trigamma, which is convex."""
    x = 0.5 + 1 / value
    for _ in range(50):
        at = float(special.polygamma(1, x))
        step = at * (1 - at / value) / float(special.polygamma(2, x))
        x += step
        if abs(step) < 1e-10 * x:
            break
    return x


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


def against_margin(values: Sequence[float], margin: float, spread: Spread) -> Margin:
    """Moderated t-test of a group's mean against a margin (Smyth 2004, section 3).

    The variance is (d0 s0^2 + d s^2) / (d0 + d), with d0 + d degrees of freedom. Three seeds alone
    say little of their variance; what others vary by is the better guess the less they differ.
    Errors of 5 % are those of all groups together; a group that varies more than most is called
    sure more often than that, one that varies less more seldom.

    Args:
      values: at least two.
      spread: of all groups that are tested so, this one among them.
    """
    known = np.array(values, float)
    own, mean = len(known) - 1, float(known.mean())
    if math.isinf(spread.degrees):
        variance = spread.variance
    else:
        whole = spread.degrees * spread.variance + own * float(known.var(ddof=1))
        variance = whole / (spread.degrees + own)
    degrees = min(spread.degrees + own, spread.known)
    error = math.sqrt(variance / len(known))
    if error == 0:
        return Margin(mean, 0.0, 1.0 if mean == margin else 0.0)
    p = 2 * special.stdtr(degrees, -abs(mean - margin) / error)
    return Margin(mean, float(special.stdtrit(degrees, 0.975) * error), float(p))
