r"""What a batch policy reads: how far microbatch gradients lie from their mean, over regions.

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
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

Scope = Literal["within", "across"]


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
        return self._per_sample(self.along)

    @property
    def variance_across(self) -> float:
        """Variance of one sample's gradient orthogonal to gbar, summed over components."""
        return self._per_sample(max(0.0, self.spread - self.along))

    @property
    def signal(self) -> float:
        """Estimate of ||g||^2: ||gbar||^2 without its noise; may be negative."""
        return self.gbar2 - self.spread / self._freedom / self.microbatches

    @property
    def averaged(self) -> float:
        """Regions whose batches are in one tested mean: 1 (`within`) or all (`across`)."""
        return self.regions / self.groups

    def _per_sample(self, total: float) -> float:
        return self.samples * total / self._freedom

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
