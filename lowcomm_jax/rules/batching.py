r"""Batch policies: how many samples a region's next steps take, from the noise of its gradients.

M microbatches of m samples have the mean gradients g_1, ..., g_M, all at one point; gbar is their
mean. With Sigma the covariance of one sample's gradient,

.. math::
   S = \sum_j \|g_j - \bar g\|^2, \quad E\,S = (M-1)\,\mathrm{tr}\Sigma / m, \quad
   E\|\bar g\|^2 = \|g\|^2 + \mathrm{tr}\Sigma / (m M)

so that m S / (M-1) estimates tr Sigma for every m, and ||gbar||^2 - S / (M (M-1)) estimates
||g||^2. Without this correction the noise of a small batch counts as signal.

Where microbatches hold different numbers of tokens, g_j has the weight w_j = n_j / nbar in gbar and
S, with n_j its tokens and nbar their mean in its region. A g_j has the covariance C / n_j, with C
that of one token's gradient. Then the lines above hold with tr C / nbar in place of tr Sigma / m
(of regions with other nbar, with its mean over regions), so that both estimates stay right. Equal
weights would measure another gradient than the one that is trained on.

AdLoCo (arXiv 2508.18182) takes its tests from Bollapragada et al. (arXiv 1710.11258) and AdAdaGrad
(arXiv 2402.11215). With v and w, the variance of one sample's gradient along gbar and orthogonal to
it (v + w = tr Sigma), and the debiased ||g||^2, the batch must be at least

====================== =========================================
norm                   (v + w) / (eta^2 ||g||^2)
inner product          v / (vartheta^2 ||g||^2)
augmented              max(inner product, w / (nu^2 ||g||^2))
====================== =========================================

`within` a region that is the batch of one region's step. `across` regions the mean over R regions
is tested, and each region's batch is 1 / R of it. With one microbatch of b samples a region (M = R)
the latter is the published form, T = b/(M-1) S / (M eta^2 ||gbar||^2).

Differs from the paper: ||gbar||^2 is debiased. (Of the ||gbar||^4 of the inner-product test one
factor normalises the direction and stays; `debias=False` leaves both as published.) The statistics
are smoothed over rounds. Differs from the published code, whose orthogonality test is about d times
too small and whose inner-product test lacks the factor b / M and reads nu.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

__all__ = [
    "Adaptive",
    "AugmentedTest",
    "BatchPolicy",
    "Fixed",
    "InnerProductTest",
    "NormTest",
    "Statistics",
    "pooled",
]

Scope = Literal["within", "across"]
State = dict[str, float]
NEAR_ZERO = 1e-12  # of ||g||^2, below which there is no signal to measure noise against
TOLERANCES = ("eta", "theta", "nu")


# -- what a policy reads --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of microbatch gradients, reduced over regions and the same in every region.

    Attributes:
      regions: regions that took part.
      groups: means gbar there are: one a region (`within`), or 1 (`across`).
      microbatches: M, microbatch gradients behind each gbar.
      samples: m, samples of a microbatch.
      gbar2: ||gbar||^2, mean over groups.
      spread: S, summed over groups.
      along: the part of S in the direction of gbar, sum of <g_j - gbar, gbar>^2 / ||gbar||^2,
        summed over groups. S - along is the part orthogonal to gbar.
    """

    regions: int
    groups: int
    microbatches: int
    samples: int
    gbar2: float
    spread: float
    along: float

    @property
    def finite(self) -> bool:
        """Whether all statistics are finite."""
        return all(map(math.isfinite, (self.gbar2, self.spread, self.along)))

    @property
    def has_variance(self) -> bool:
        """Whether there are deviations at all; else variances and `signal` are not defined.

        One microbatch behind a gbar has none: with `across` and one microbatch a region, a round in
        which one region takes part.
        """
        return self._freedom > 0

    @property
    def variance_along(self) -> float:
        """Variance of one sample's gradient in the direction of gbar."""
        return self.samples * self.along / self._freedom

    @property
    def variance_across(self) -> float:
        """Variance of one sample's gradient orthogonal to gbar, summed over components."""
        return self.samples * max(0.0, self.spread - self.along) / self._freedom

    @property
    def signal(self) -> float:
        """Estimate of ||g||^2: ||gbar||^2 without its noise; may be negative."""
        return self.gbar2 - self.spread / self._freedom / self.microbatches

    @property
    def averaged(self) -> float:
        """Regions whose batches are in one tested mean: 1 (`within`) or all (`across`)."""
        return self.regions / self.groups

    @property
    def _freedom(self) -> int:
        return self.groups * (self.microbatches - 1)


def pooled(
    values_R: dict[str, np.ndarray],
    scope: Scope,
    microbatches: int,
    samples: int,
    takes_part_R: np.ndarray | None = None,
) -> Statistics:
    """Reduce what the regions measured, in region order and float64.

    Args:
      values_R: float `[R]` `gbar2`, `spread`, `along` of each region's own microbatches.
      scope: `within`: deviations from the region's own gbar; `across`: from that of all regions.
      microbatches: that each region measured.
      samples: m, of a microbatch.
      takes_part_R: bool `[R]`, at least one True; None = all.
    """
    count = len(values_R["gbar2"])
    part = np.ones(count, bool) if takes_part_R is None else np.asarray(takes_part_R, bool)
    regions = int(part.sum())
    groups = regions if scope == "within" else 1
    gbar2, spread, along = (
        float(np.add.accumulate(np.asarray(values_R[k], np.float64)[part])[-1])
        for k in ("gbar2", "spread", "along")
    )
    behind = microbatches * regions // groups
    return Statistics(regions, groups, behind, samples, gbar2 / regions, spread, along)


# -- policies -------------------------------------------------------------------------------------


class BatchPolicy(abc.ABC):
    """Decides how many samples a region's next optimizer steps take.

    Attributes:
      start: samples of a region's first steps.
      cap: most samples of a region's step; None = no limit.
      shares: R positive numbers, how regions of uneven hardware share a step; None = equally.
      microbatches: gradients that each region measures per decision, which costs twice that many
        forward and backward passes; 0 = nothing is measured, and `start` is kept.
      scope: `within`: deviations from a region's own mean gradient; only scalars travel. `across`:
        from the mean of all regions, which costs one dense reduction of a gradient per decision.
    """

    start: int
    cap: int | None
    shares: Sequence[float] | None = None
    microbatches: int = 0
    scope: Scope = "within"

    def violations(self, regions: int) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        counts: dict[str, Any] = {"start": self.start}
        if self.cap not in (None, self.start):
            counts["cap"] = self.cap
        found = [
            f"{name}={value}: a whole number of samples, at least 1, is needed"
            for name, value in counts.items()
            if not isinstance(value, int) or value < 1
        ]
        if not found and self.cap is not None and self.cap < self.start:
            fix = f"use cap={self.start}, or start={self.cap}"
            found.append(f"cap={self.cap} is below start={self.start}: {fix}")
        shares = self.shares
        if shares is not None:
            fine = len(shares) == regions and all(math.isfinite(s) and s > 0 for s in shares)
            if not fine:
                fix = f"give {regions} positive numbers, one a region"
                found.append(f"shares={tuple(shares)}: {fix}")
        return found

    def init(self) -> State:
        """What the policy remembers before the first decision, plain floats by name."""
        return {}

    @abc.abstractmethod
    def decide(self, state: State, statistics: Statistics, batch: int) -> tuple[State, int]:
        """The next batch; a pure function of reduced data.

        Args:
          state: of `init`, or of the decision before.
          batch: samples a region and step so far.

        Returns:
          (new state, samples a region and step).
        """


@dataclasses.dataclass(frozen=True)
class Fixed(BatchPolicy):
    """Always `start` samples, shared by `shares`; see `BatchPolicy`."""

    start: int
    shares: Sequence[float] | None = None

    @property
    def cap(self) -> int:  # type: ignore[override]
        """`start`: the batch never grows."""
        return self.start

    def decide(self, state: State, statistics: Statistics, batch: int) -> tuple[State, int]:
        """The state and batch as they are."""
        del statistics
        return state, batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(BatchPolicy):
    """Base of the tests; a subclass says how much each variance counts (`required`).

    Attributes:
      start, cap, microbatches, scope, shares: see `BatchPolicy`.
      smoothing: weight in [0, 1) of the past in the averages of v, w and ||g||^2.
      monotone: the batch never shrinks.
      growth: largest factor of one decision, above 1; None = no limit. A test of few samples may
        by chance see almost no signal, and then asks for a huge batch.
      debias: subtract the noise from ||gbar||^2.
    """

    start: int
    cap: int | None
    microbatches: int = 4
    scope: Scope = "within"
    smoothing: float = 0.5
    monotone: bool = True
    growth: float | None = None
    debias: bool = True
    shares: Sequence[float] | None = None

    @abc.abstractmethod
    def required(self, along: float, across: float) -> float:
        """Batch times ||g||^2 that the test asks for, from the variances of one sample."""

    def violations(self, regions: int) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        found, count = super().violations(regions), self.microbatches
        for name in TOLERANCES:
            value = getattr(self, name, 1.0)
            if not (math.isfinite(value) and value > 0):
                found.append(f"{name}={value}: a positive number is needed")
        if not 0 <= self.smoothing < 1:
            found.append(f"smoothing={self.smoothing}: a weight in [0, 1) is needed")
        if self.growth is not None and not self.growth > 1:
            found.append(f"growth={self.growth}: a factor above 1 is needed, or None")
        if not isinstance(count, int) or count < 1:
            found.append(f"microbatches={count}: a whole number, at least 1, is needed")
        elif self.scope not in ("within", "across"):
            found.append(f"scope={self.scope!r}: use 'within' or 'across'")
        elif self.scope == "across" and regions < 2:
            found.append(f"scope='across' with {regions} region: there is no other; use 'within'")
        elif self.scope == "within" and count < 2:
            found.append(
                "microbatches=1: one gradient a region has no variance; use at least 2, or "
                "scope='across' with several regions"
            )
        return found

    def init(self) -> State:
        """Averages of nothing: all values, and their weight, are 0."""
        return {"weight": 0.0, "along": 0.0, "across": 0.0, "signal": 0.0}

    def decide(self, state: State, statistics: Statistics, batch: int) -> tuple[State, int]:
        """Smooth the statistics, then ask the test; see `BatchPolicy.decide`.

        Statistics that are not finite, or of one microbatch in all, change nothing. With ||g||^2
        near zero (or, debiased, not above zero) the batch stays.
        """
        if not (statistics.finite and statistics.has_variance):
            return state, batch
        measured = {
            "weight": 1.0,
            "along": statistics.variance_along,
            "across": statistics.variance_across,
            "signal": statistics.signal if self.debias else statistics.gbar2,
        }
        keep, new = self.smoothing, 1 - self.smoothing
        state = {name: keep * state[name] + new * value for name, value in measured.items()}
        if state["signal"] / state["weight"] <= NEAR_ZERO:
            return state, batch
        asked = self.required(state["along"], state["across"]) / state["signal"]
        most = math.inf if self.cap is None else self.cap
        if self.growth is not None:
            most = min(most, max(batch + 1, math.floor(batch * self.growth)))
        least = batch if self.monotone else self.start
        return state, max(least, math.ceil(min(asked / statistics.averaged, most)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormTest(Adaptive):
    """The gradient's noise must stay below eta of its length: batch >= (v + w) / (eta ||g||)^2.

    Attributes:
      eta: tolerated noise to signal; 0.8 in the published configuration.
    """

    eta: float = 0.8

    def required(self, along: float, across: float) -> float:
        return (along + across) / self.eta**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerProductTest(Adaptive):
    """The noise along the gradient must stay below theta of it: batch >= v / (theta ||g||)^2.

    Attributes:
      theta: the paper's vartheta. The published configuration says 0.01, which its code never
        reads; the default is our choice.
    """

    theta: float = 0.9

    def required(self, along: float, across: float) -> float:
        del across
        return along / self.theta**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentedTest(Adaptive):
    """The inner-product test, and orthogonal noise below nu: batch >= w / (nu ||g||)^2 as well.

    Attributes:
      theta: as in `InnerProductTest`.
      nu: tolerated noise orthogonal to the gradient. The published configuration says 0.3, for a
        test about d times weaker. The default is our choice: nearly all noise of d coordinates is
        orthogonal to the gradient.
    """

    theta: float = 0.9
    nu: float = 5.84

    def required(self, along: float, across: float) -> float:
        return max(along / self.theta**2, across / self.nu**2)
