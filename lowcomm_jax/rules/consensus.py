r"""How far gossiping regions are apart: predicted from the coefficients, and measured.

With gossip the model is any region's, or their average; the regions are kept close, never equal.
`Consensus` says for which coefficients they stay together, and how fast the variance over regions
shrinks while gradients add nothing to it. Three measures of a run:

- `pull_norm` of a landing event: every region's distance from its group's mean anchor. From it
  `Consensus.variance` estimates the variance over all regions without another message.
- `variance(state)`: the variance itself. It needs all anchors, so it belongs to evaluations.
- `judge(state, loss_of)`: the loss of every region's model, and of their average.

`contraction` is the factor per round of a run that happened.

The theory: write $x_i$ and $p_i$ for the deviations of anchor and momentum from their means over
$R$ regions. Groups of $n$ are drawn afresh each round, every pair equally likely. With $r_i$ the
deviation from the group mean, $E\sum x_i r_i = E\sum r_i^2 = k \sum x_i^2$ and
$E\sum p_i r_i = k \sum p_i x_i$,

$$k = \frac{n \lfloor R/n \rfloor}{R}\cdot\frac{(n - 1)\,R}{n\,(R - 1)} ,$$

so that $(\sum p^2, \sum px, \sum x^2)$ obeys a linear recursion, exact without noise. Both variants
of `outer.gossip` have the form $p' = a p - g r$, $x' = x + A p - B g r$. For heavy ball
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

Source: derived here for the rule of NoLoCo, arXiv 2506.10911; `tests/rules` checks it by sampling.

Differs from the paper: the paper bounds $\gamma$ by $\sqrt{n/(2(n-1))}\,(\alpha, 2 + \alpha)$. For
pairs of very many regions the mean-square limit is $2(1 - \alpha^2)$: 1.50 at $\alpha = 0.5$ but
0.38 at $\alpha = 0.9$, so DiLoCo's momentum cannot be reused with $\gamma = 0.7$.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.mesh.offload import unstow
from lowcomm_jax.params_view import global_params, region_params
from lowcomm_jax.rules.outer import Variant
from lowcomm_jax.state.train_state import TrainState

PyTree = Any

__all__ = ["Consensus", "Judgement", "contraction", "judge", "variance"]


@dataclasses.dataclass(frozen=True)
class Consensus:
    """Gossip coefficients, and whether regions stay together by them.

    Each is within its own range (`outer.gossip_problems`). Regions beyond the last full group sit a
    round out.

    Attributes:
      alpha: momentum, in [0, 1).
      gamma: pull towards the group, not negative.
      group_size: regions in a group, from 2 to the number of regions.
      variant: as in `outer.gossip`.
      names: what the method calls `alpha` and `gamma`.

    >>> round(Consensus(0.5, 0.7, group_size=2).contraction(regions=1024), 2)
    0.7
    >>> round(Consensus(0.5, 0.7, group_size=2).gamma_limit(regions=8), 3)
    1.615
    >>> Consensus(0.9, 0.7, group_size=2).violations(regions=8)
    ['gamma=0.7 lets 8 regions in groups of 2 drift apart: with alpha=0.9 and heavy_ball the \
stable range is 0 < gamma < 0.436; choose gamma inside it or a smaller alpha']
    """

    alpha: float
    gamma: float
    group_size: int
    variant: Variant = "heavy_ball"
    names: tuple[str, str] = ("alpha", "gamma")

    def second_moments(self, regions: int) -> np.ndarray:
        """The matrix that advances (sum p^2, sum p x, sum x^2) by one round, float64 `[3, 3]`."""
        k, a, g = _seen_share(self.group_size, regions), self.alpha, self.gamma
        big_a, big_b = (a, 1.0) if self.variant == "heavy_ball" else (a * a, 1.0 + a)
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

    def contraction(self, regions: int) -> float:
        """The factor per round by which the variance over regions shrinks in the long run.

        It is the spectral radius of `second_moments`; above 1 the regions drift apart.
        """
        return float(np.max(np.abs(np.linalg.eigvals(self.second_moments(regions)))))

    def gamma_limit(self, regions: int) -> float:
        """The value that gamma must stay below for the regions to stay together."""
        a, k = self.alpha, _seen_share(self.group_size, regions)
        constant = 2 * (1 - a * a)
        if self.variant == "heavy_ball":
            return constant / (1 + a - 2 * a * k)
        square = a * k * (1 + 2 * a)
        linear = 1 + a - 2 * a * k - 4 * a * a * k
        # The root in the form that stays finite as alpha, and with it the square term, goes to 0.
        return 2 * constant / (linear + math.sqrt(linear * linear + 4 * square * constant))

    def violations(self, regions: int) -> list[str]:
        """One line when gamma lies outside the mean-square stable range, else nothing.

        gamma = 0 is accepted only when one group holds all regions, whose anchors then never
        differ.
        """
        alone_in_one_group = self.gamma == 0.0 and self.group_size == regions
        limit = self.gamma_limit(regions)
        if alone_in_one_group or 0.0 < self.gamma < limit:
            return []
        momentum, pull = self.names
        return [
            f"{pull}={self.gamma:g} lets {regions} regions in groups of {self.group_size} drift "
            f"apart: with {momentum}={self.alpha:g} and {self.variant} the stable range is "
            f"0 < {pull} < {limit:.3f}; choose {pull} inside it or a smaller {momentum}"
        ]

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


def variance(state: TrainState) -> jax.Array:
    """Mean over anchors of the squared L2 distance from their mean, float32 scalar on the device.

    All trained leaves count together; with one anchor for all regions it is 0.
    """

    def one(x_A):
        return jnp.sum(jnp.square(x_A - x_A.mean(axis=0, keepdims=True))) / x_A.shape[0]

    return sum((one(x_A) for x_A in unstow(state.anchor).values()), jnp.zeros(()))


def contraction(variances: Sequence[float]) -> float | None:
    """Geometric mean of the factor from round to round.

    Args:
      variances: over regions, one per round; leading zeros (anchors that are still equal) do not
        count.

    Returns:
      The factor; None where fewer than two values are left, or one of them is not positive.

    >>> contraction([0.0, 8.0, 4.0, 2.0])
    0.5
    """
    positive = np.trim_zeros(np.asarray(variances, np.float64), "f")
    if len(positive) < 2 or not (positive > 0).all():
        return None
    return float((positive[-1] / positive[0]) ** (1 / (len(positive) - 1)))


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Losses of the final models.

    Attributes:
      average: of the mean of the anchors, `global_params`.
      regions: of every region's own model, float `[R]`.
    """

    average: float
    regions: np.ndarray

    @property
    def spread(self) -> float:
        """Largest minus smallest loss of a region."""
        return float(self.regions.max() - self.regions.min())


def judge(state: TrainState, loss_of: Callable[[PyTree], jax.Array]) -> Judgement:
    """Evaluate the average model and every region's own; waits for the device.

    Args:
      state: after `Engine.finish`, so that a region's model is its anchor.
      loss_of: params (the user's tree) -> scalar loss, for example on an evaluation batch; compiled
        anew at every call.
    """
    average = jax.jit(loss_of)(global_params(state))
    regions = jax.jit(lambda models: jax.lax.map(loss_of, models))(region_params(state))
    return Judgement(float(average), np.asarray(regions, np.float64))
