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

That is the batch of one region's step; it never shrinks.

Differs from the paper: ||gbar||^2 is debiased. (Of the ||gbar||^4 of the inner-product test one
factor normalises the direction and stays.) The statistics are smoothed over rounds. Differs from
the published code, which measures the last gradients of regions that have drifted apart; deviations
are here from the mean gradient of each region. Its orthogonality test is about d times too small,
and its inner-product test lacks the factor b / M and reads nu.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import numpy as np

from lowcomm_jax.refused import is_whole

__all__ = [
    "NAMES",
    "AugmentedTest",
    "BatchPolicy",
    "Fixed",
    "NoiseTest",
    "NormTest",
    "Statistics",
    "pooled",
]

State = dict[str, float]
NEAR_ZERO = 1e-12  # of ||g||^2, below which there is no signal to measure noise against


# -- what a policy reads --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Estimates from microbatch gradients of all regions; the same in every region.

    Attributes:
      gbar2: ||gbar||^2, mean over regions.
      signal: estimate of ||g||^2: ||gbar||^2 without its noise; may be negative.
      variance_along: v, variance of one sample's gradient in the direction of gbar.
      variance_across: w, the same orthogonal to gbar, summed over components.
    """

    gbar2: float
    signal: float
    variance_along: float
    variance_across: float


def pooled(measured_Rx3: np.ndarray, microbatches: int, samples: int) -> Statistics:
    """Reduce what the regions measured that count, in region order and float64.

    Args:
      measured_Rx3: of at least one region, each around its own gbar: ||gbar||^2; S; and the part of
        S in the direction of gbar, sum of <g_j - gbar, gbar>^2 / ||gbar||^2.
      microbatches: M, at least 2, that each region measured.
      samples: m, of a microbatch.
    """
    values_Rx3 = np.asarray(measured_Rx3, np.float64)
    gbar2, spread, along = np.add.accumulate(values_Rx3)[-1].tolist()
    regions = len(values_Rx3)
    gbar2, freedom = gbar2 / regions, regions * (microbatches - 1)
    return Statistics(
        gbar2=gbar2,
        signal=gbar2 - spread / freedom / microbatches,
        variance_along=samples * along / freedom,
        variance_across=samples * max(0.0, spread - along) / freedom,
    )


# -- policies -------------------------------------------------------------------------------------


class BatchPolicy(abc.ABC):
    """Decides how many samples a region's next optimizer steps take.

    Attributes:
      start: samples of a region's first steps.
      cap: most samples of a region's step.
      microbatches: gradients that each region measures per decision, which costs twice that many
        forward and backward passes, at least 2; 0 = nothing is measured, and `start` is kept.
    """

    start: int
    cap: int
    microbatches: int = 0

    def violations(self) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        samples, count = {"start": self.start}, self.microbatches
        if self.cap != self.start:
            samples["cap"] = self.cap
        found = [
            f"{name}={value}: a whole number of samples, at least 1, is needed"
            for name, value in samples.items()
            if not (is_whole(value) and value >= 1)
        ]
        if not found and self.cap < self.start:
            fix = f"use cap={self.start}, or start={self.cap}"
            found.append(f"cap={self.cap} is below start={self.start}: {fix}")
        if not (is_whole(count) and count >= 0 and count != 1):
            why = "one gradient a region has no variance; give 0, or at least 2"
            found.append(f"microbatches={count}: {why}")
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
    """Always `start` samples; see `BatchPolicy`."""

    start: int

    @property
    def cap(self) -> int:  # type: ignore[override]
        """`start`: the batch never grows."""
        return self.start

    def decide(self, state: State, statistics: Statistics, batch: int) -> tuple[State, int]:
        """The state and batch as they are."""
        del statistics
        return state, batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseTest(BatchPolicy):
    """Base of the tests; a subclass says how much each variance counts (`required`).

    Attributes:
      start, cap, microbatches: see `BatchPolicy`.
      smoothing: weight in [0, 1) of the past in the averages of v, w and ||g||^2.
    """

    start: int
    cap: int
    microbatches: int = 4
    smoothing: float = 0.5

    @abc.abstractmethod
    def required(self, along: float, across: float) -> float:
        """Batch times ||g||^2 that the test asks for, from the variances of one sample."""

    def violations(self) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        found = super().violations()
        for name in ("eta", "theta", "nu"):
            value = getattr(self, name, 1.0)
            if not value > 0:
                found.append(f"{name}={value}: a positive number is needed")
        if not 0 <= self.smoothing < 1:
            found.append(f"smoothing={self.smoothing}: a weight in [0, 1) is needed")
        if self.microbatches == 0:
            found.append("microbatches=0: the test needs gradients; give at least 2, or use Fixed")
        return found

    def init(self) -> State:
        """Averages of nothing: all values, and their weight, are 0."""
        return {"weight": 0.0, "along": 0.0, "across": 0.0, "signal": 0.0}

    def decide(self, state: State, statistics: Statistics, batch: int) -> tuple[State, int]:
        """Smooth the statistics, then ask the test; see `BatchPolicy.decide`.

        Statistics that are not finite change nothing. With ||g||^2 not above zero, or near it, the
        batch stays.
        """
        if not all(map(math.isfinite, dataclasses.astuple(statistics))):
            return state, batch
        measured = {
            "weight": 1.0,
            "along": statistics.variance_along,
            "across": statistics.variance_across,
            "signal": statistics.signal,
        }
        keep, new = self.smoothing, 1 - self.smoothing
        state = {name: keep * state[name] + new * value for name, value in measured.items()}
        if state["signal"] / state["weight"] <= NEAR_ZERO:
            return state, batch
        asked = self.required(state["along"], state["across"]) / state["signal"]
        return state, max(batch, math.ceil(min(asked, self.cap)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormTest(NoiseTest):
    """The gradient's noise must stay below eta of its length: batch >= (v + w) / (eta ||g||)^2.

    Attributes:
      eta: tolerated noise to signal; 0.8 in the published configuration.
    """

    eta: float = 0.8

    def required(self, along: float, across: float) -> float:
        return (along + across) / self.eta**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentedTest(NoiseTest):
    """The noise along the gradient stays below theta of it, and that orthogonal to it below nu.

    Attributes:
      theta: the paper's vartheta, of the inner-product test. The published configuration says
        0.01, which its code never reads; the default is our choice.
      nu: tolerated noise orthogonal to the gradient; inf = the inner-product test alone. The
        published configuration says 0.3, for a test about d times weaker. The default is our
        choice: nearly all noise of d coordinates is orthogonal to the gradient.
    """

    theta: float = 0.9
    nu: float = 5.84

    def required(self, along: float, across: float) -> float:
        return max(along / self.theta**2, across / self.nu**2)


NAMES: dict[str, type[BatchPolicy]] = {
    "fixed": Fixed,
    "norm": NormTest,
    "augmented": AugmentedTest,
}
