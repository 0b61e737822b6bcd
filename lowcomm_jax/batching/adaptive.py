r"""Batches that grow with the gradients' noise: norm, inner-product and augmented test.

AdLoCo (arXiv 2508.18182) takes the tests of Bollapragada et al. (arXiv 1710.11258) and AdAdaGrad
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

from lowcomm_jax.batching.base import State, size_violations
from lowcomm_jax.batching.statistics import Scope, Statistics

NEAR_ZERO = 1e-12  # of ||g||^2, below which there is no signal to measure noise against


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(abc.ABC):
    """Base of the tests; a subclass says how much each variance counts (`required`).

    Attributes:
      start: samples of a region's first steps.
      cap: most samples of a region's step; None = no limit.
      microbatches: gradients each region measures per decision. Measuring costs twice that many
        forward and backward passes of a microbatch.
      scope: `within`: deviations from a region's own mean gradient; only scalars travel. `across`:
        from the mean of all regions, which costs one dense reduction of a gradient per decision.
      smoothing: weight in [0, 1) of the past in the averages of v, w and ||g||^2.
      monotone: the batch never shrinks.
      growth: largest factor of one decision, above 1; None = no limit. A test of few samples may
        by chance see almost no signal, and then asks for a huge batch.
      debias: subtract the noise from ||gbar||^2.
      shares: R positive numbers, how regions of uneven hardware share a step; None = equally.
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

    @property
    def adapts(self) -> bool:
        """True: every decision needs statistics."""
        return True

    @abc.abstractmethod
    def required(self, along: float, across: float) -> float:
        """Batch times ||g||^2 that the test asks for, from the variances of one sample."""

    @abc.abstractmethod
    def tolerances(self) -> dict[str, float]:
        """The test's parameters by name."""

    def violations(self, regions: int) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        found = size_violations(self.start, self.cap, self.shares, regions)
        for name, value in self.tolerances().items():
            if not (math.isfinite(value) and value > 0):
                found.append(f"{name}={value}: a positive number is needed")
        if not 0 <= self.smoothing < 1:
            found.append(f"smoothing={self.smoothing}: a weight in [0, 1) is needed")
        if self.growth is not None and not self.growth > 1:
            found.append(f"growth={self.growth}: a factor above 1 is needed, or None")
        return found + self._scope_violations(regions)

    def _scope_violations(self, regions: int) -> list[str]:
        count = self.microbatches
        if not isinstance(count, int) or count < 1:
            return [f"microbatches={count}: a whole number, at least 1, is needed"]
        if self.scope not in ("within", "across"):
            return [f"scope={self.scope!r}: use 'within' or 'across'"]
        if self.scope == "across" and regions < 2:
            return [f"scope='across' with {regions} region: there is no other; use 'within'"]
        if self.scope == "within" and count < 2:
            return [
                "microbatches=1: one gradient a region has no variance; use at least 2, or "
                "scope='across' with several regions"
            ]
        return []

    def init(self) -> State:
        """Averages of nothing: all values, and their weight, are 0."""
        return {"weight": 0.0, "along": 0.0, "across": 0.0, "signal": 0.0}

    def decide(self, state: State, statistics: Statistics, batch: int) -> tuple[State, int]:
        """Smooth the statistics, then ask the test.

        Statistics that are not finite, or of one microbatch in all, change nothing. With ||g||^2
        near zero (or, debiased, not above zero) the batch stays.

        Args:
          state: of `init`, or of the decision before.
          batch: samples a region and step so far.

        Returns:
          (new state, samples a region and step).
        """
        if not (statistics.finite and statistics.has_variance):
            return state, batch
        state = self._smoothed(state, statistics)
        signal = state["signal"] / state["weight"]
        if signal <= NEAR_ZERO:
            return state, batch
        asked = self.required(state["along"], state["across"]) / state["signal"]
        return state, self._limited(asked / statistics.averaged, batch)

    def _smoothed(self, state: State, statistics: Statistics) -> State:
        keep, new = self.smoothing, 1 - self.smoothing
        measured = {
            "weight": 1.0,
            "along": statistics.variance_along,
            "across": statistics.variance_across,
            "signal": statistics.signal if self.debias else statistics.gbar2,
        }
        return {k: keep * state[k] + new * v for k, v in measured.items()}

    def _limited(self, asked: float, batch: int) -> int:
        most = math.inf if self.cap is None else self.cap
        if self.growth is not None:
            most = min(most, max(batch + 1, math.floor(batch * self.growth)))
        least = batch if self.monotone else self.start
        return max(least, math.ceil(min(asked, most)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormTest(Adaptive):
    """The gradient's noise must stay below eta of its length: batch >= (v + w) / (eta ||g||)^2.

    Attributes:
      eta: tolerated noise to signal; 0.8 in the published configuration.
    """

    eta: float = 0.8

    def required(self, along: float, across: float) -> float:
        return (along + across) / self.eta**2

    def tolerances(self) -> dict[str, float]:
        return {"eta": self.eta}


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

    def tolerances(self) -> dict[str, float]:
        return {"theta": self.theta}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentedTest(InnerProductTest):
    """The inner-product test, and orthogonal noise below nu: batch >= w / (nu ||g||)^2 as well.

    Attributes:
      nu: tolerated noise orthogonal to the gradient. The published configuration says 0.3, for a
        test about d times weaker. The default is our choice: nearly all noise of d coordinates is
        orthogonal to the gradient.
    """

    nu: float = 5.84

    def required(self, along: float, across: float) -> float:
        return max(super().required(along, across), across / self.nu**2)

    def tolerances(self) -> dict[str, float]:
        return {**super().tolerances(), "nu": self.nu}
