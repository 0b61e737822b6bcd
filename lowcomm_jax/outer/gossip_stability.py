r"""For which coefficients gossip keeps regions together: mean-square consensus of R regions.

Write $x_i$ and $p_i$ for the deviations of anchor and momentum from their means over $R$ regions.
Groups of $n$ are drawn afresh each round, every pair equally likely. With $r_i$ the deviation from
the group mean, $E\sum x_i r_i = E\sum r_i^2 = k \sum x_i^2$ and $E\sum p_i r_i = k \sum p_i x_i$,

$$k = \frac{n \lfloor R/n \rfloor}{R}\cdot\frac{(n - 1)\,R}{n\,(R - 1)} ,$$

so that $(\sum p^2, \sum px, \sum x^2)$ obeys a linear recursion (`second_moment_matrix`), exact
without noise. Both rules have the form $p' = a p - g r$, $x' = x + A p - B g r$. For heavy ball
$(A, B) = (a, 1)$, for the look-ahead $(a^2, 1 + a)$. The map takes the cone of positive
semidefinite moments into itself, so that its spectral radius is itself an eigenvalue. It passes 1
exactly where the determinant of (matrix - identity) vanishes:

$$\text{heavy ball: } 0 < g < \frac{2(1 - a^2)}{1 + a - 2ak}, \qquad
  \text{nesterov: } ak(1 + 2a)\,g^2 + (1 + a - 2ak - 4a^2k)\,g - 2(1 - a^2) < 0 .$$

| symbol | meaning |
| --- | --- |
| $a, g$ | `alpha` (momentum), `gamma` (pull towards the group) |
| $n, R$ | `group_size`, `regions` |
| $k$ | share of a deviation that the group sees; its first factor is 1 if $n$ divides $R$ |

Source: derived here for the rule of NoLoCo, arXiv 2506.10911; `tests/outer` checks it by sampling.

Differs from the paper: the paper bounds $\gamma$ by $\sqrt{n/(2(n-1))}\,(\alpha, 2 + \alpha)$. For
pairs of very many regions the mean-square limit is $2(1 - \alpha^2)$: 1.50 at $\alpha = 0.5$ but
0.38 at $\alpha = 0.9$, so DiLoCo's momentum cannot be reused with $\gamma = 0.7$.
"""

import dataclasses
import math

import numpy as np

from lowcomm_jax.outer.gossip import VARIANTS, Variant
from lowcomm_jax.refused import in_range, one_of, refuse


def second_moment_matrix(
    alpha: float, gamma: float, group_size: int, regions: int, variant: Variant = "heavy_ball"
) -> np.ndarray:
    """Build the 3 x 3 matrix that advances (sum p^2, sum p x, sum x^2) by one round, float64.

    Regions beyond the last full group sit the round out.
    """
    k = _seen_share(group_size, regions)
    a, g = alpha, gamma
    big_a, big_b = (a, 1.0) if variant == "heavy_ball" else (a * a, 1.0 + a)
    return np.array(
        [
            [a * a, -2 * a * g * k, g * g * k],
            [a * big_a, a - (big_a + a * big_b) * g * k, -g * k + big_b * g * g * k],
            [
                big_a**2,
                2 * big_a - 2 * big_a * big_b * g * k,
                1 - 2 * big_b * g * k + (big_b * g) ** 2 * k,
            ],
        ]
    )


def contraction_factor(
    alpha: float, gamma: float, group_size: int, regions: int, variant: Variant = "heavy_ball"
) -> float:
    """Return the factor per round by which the variance over regions shrinks in the long run.

    It is the spectral radius of `second_moment_matrix`; above 1 the regions drift apart.

    >>> round(contraction_factor(0.5, 0.7, group_size=2, regions=1024), 2)
    0.7
    """
    matrix = second_moment_matrix(alpha, gamma, group_size, regions, variant)
    return float(np.max(np.abs(np.linalg.eigvals(matrix))))


def gamma_limit(
    alpha: float, group_size: int, regions: int, variant: Variant = "heavy_ball"
) -> float:
    """Return the value that gamma must stay below for the regions to stay together.

    >>> round(gamma_limit(0.5, group_size=2, regions=8), 3)
    1.615
    """
    a, k = alpha, _seen_share(group_size, regions)
    constant = 2 * (1 - a * a)
    if variant == "heavy_ball":
        return constant / (1 + a - 2 * a * k)
    square = a * k * (1 + 2 * a)
    linear = 1 + a - 2 * a * k - 4 * a * a * k
    # The root in the form that stays finite as alpha, and with it the square term, goes to 0.
    return 2 * constant / (linear + math.sqrt(linear * linear + 4 * square * constant))


def check_stability(
    alpha: float, gamma: float, group_size: int, regions: int, variant: Variant = "heavy_ball"
) -> None:
    """Refuse gossip coefficients under which the regions drift apart.

    gamma = 0 is accepted only when one group holds all regions, whose anchors then never differ.

    Args:
      alpha: momentum, in [0, 1).
      gamma: pull towards the group.
      group_size: regions in a group, from 2 to ``regions``.
      regions: number of regions.
      variant: as in `gossip`.

    Raises:
      ValueError: an argument is out of range (all are listed), or gamma lies outside the
        mean-square stable range, which is printed.

    >>> check_stability(0.5, 0.7, group_size=2, regions=8)
    >>> check_stability(0.9, 0.7, group_size=2, regions=8)
    Traceback (most recent call last):
      ...
    ValueError: check_stability:
      - gamma=0.7 lets 8 regions in groups of 2 drift apart: with alpha=0.9 and heavy_ball the \
stable range is 0 < gamma < 0.436; choose gamma inside it or a smaller alpha
    """
    violations = [
        in_range("alpha", alpha, 0.0, 1.0, open_high=True),
        in_range("gamma", gamma, 0.0, float("inf")),
        in_range("group_size", group_size, 2, max(regions, 2)),
        in_range("regions", regions, 2, float("inf")),
        one_of("variant", variant, VARIANTS),
    ]
    refuse("check_stability", violations)
    refuse("check_stability", Consensus(alpha, gamma, group_size, variant).violations(regions))


@dataclasses.dataclass(frozen=True)
class Consensus:
    """Gossip coefficients, each within its own range, and whether R regions stay together by them.

    Attributes:
      alpha, gamma, group_size, variant: as in `check_stability`.
    """

    alpha: float
    gamma: float
    group_size: int
    variant: Variant = "heavy_ball"

    def violations(self, regions: int) -> list[str]:
        """One line when gamma lies outside the mean-square stable range, else nothing."""
        alone_in_one_group = self.gamma == 0.0 and self.group_size == regions
        limit = gamma_limit(self.alpha, self.group_size, regions, self.variant)
        if alone_in_one_group or 0.0 < self.gamma < limit:
            return []
        return [
            f"gamma={self.gamma:g} lets {regions} regions in groups of {self.group_size} drift "
            f"apart: with alpha={self.alpha:g} and {self.variant} the stable range is "
            f"0 < gamma < {limit:.3f}; choose gamma inside it or a smaller alpha"
        ]

    def contraction(self, regions: int) -> float:
        """See `contraction_factor`."""
        return contraction_factor(self.alpha, self.gamma, self.group_size, regions, self.variant)

    def variance(self, pull_norm_R: np.ndarray) -> float:
        """Estimate the variance over regions from one round's pulls, without another message.

        Over the draw of groups the expectation of the mean of ||phi_i - mean_G phi||^2 is k times
        the variance, with k of the module docstring.

        Args:
          pull_norm_R: `pull_norm` of a landing, one per region, everybody taking part.

        Returns:
          mean over regions of ||phi_i - mean phi||^2, as estimated.
        """
        pull_R = np.asarray(pull_norm_R, np.float64)
        return float(np.mean(pull_R**2) / _seen_share(self.group_size, len(pull_R)))


def _seen_share(group_size: int, regions: int) -> float:
    in_full_groups = group_size * (regions // group_size) / regions
    return in_full_groups * (group_size - 1) * regions / (group_size * (regions - 1))
