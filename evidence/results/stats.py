"""Moderated t-tests (Smyth 2004), which no library that we use has: small groups lend variance.

Holm's correction is statsmodels' (`multipletests`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats
from scipy.special import digamma, polygamma


def effect_size(values: Sequence[float]) -> float | None:
    """Hedges' g of paired differences: mean over standard deviation, times 1 - 3 / (4 n - 5).

    Hedges (1981); with n values there are n - 1 degrees of freedom. None without any spread, and
    with fewer than three values: of two the factor is 0.
    """
    if len(values) < 3 or np.ptp(values) == 0:
        return None
    return float(np.mean(values) / np.std(values, ddof=1) * (1 - 3 / (4 * len(values) - 5)))


class Spread(NamedTuple):
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
    variances, total = np.array([x.var(ddof=1) for x in known]), int(degrees.sum())
    if not variances.any():
        return Spread(0.0, math.inf, total)
    # A variance of 0, as of three equal values, has no logarithm.
    variances = np.maximum(variances, 1e-5 * np.median(variances[variances > 0]))
    if len(known) == 1:
        return Spread(float(variances[0]), 0.0, total)
    logs = np.log(variances) - digamma(degrees / 2) + np.log(degrees / 2)
    beyond = float(logs.var(ddof=1) - polygamma(1, degrees / 2).mean())
    if beyond <= 0:
        return Spread(float(degrees @ variances / total), math.inf, total)
    # trigamma(x) lies between 1 / x and 1 / x + 1 / x^2.
    ends = 0.5 / beyond, 1 + 2 / beyond
    prior = optimize.brentq(lambda x: polygamma(1, x) - beyond, *ends, xtol=1e-14)
    centre = float(np.exp(logs.mean() + digamma(prior) - math.log(prior)))
    return Spread(centre, 2 * prior, total)


class Margin(NamedTuple):
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
    own, mean, variance = len(values) - 1, float(np.mean(values)), spread.variance
    if math.isfinite(spread.degrees):
        whole = spread.degrees * variance + own * np.var(values, ddof=1)
        variance = whole / (spread.degrees + own)
    degrees = min(spread.degrees + own, spread.known)
    error = math.sqrt(variance / len(values))
    if error == 0:
        return Margin(mean, 0.0, 1.0 if mean == margin else 0.0)
    p = 2 * stats.t.sf(abs(mean - margin) / error, degrees)
    return Margin(mean, float(stats.t.ppf(0.975, degrees) * error), float(p))
