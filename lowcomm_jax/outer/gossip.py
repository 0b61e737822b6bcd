r"""NoLoCo's gossip momentum: regions average in small random groups, never all of them at once.

$$\delta_i \leftarrow \alpha\,\delta_i - \beta\,\bar\Delta_G
  - \gamma\,\big(\phi_i - \bar\phi_G\big)$$
$$\text{heavy ball: } \phi_i \leftarrow \phi_i + \delta_i, \qquad
  \text{nesterov: } \phi_i \leftarrow \phi_i + \alpha\,\delta_i - \beta\,\bar\Delta_G
  - \gamma\,\big(\phi_i - \bar\phi_G\big)$$

| symbol | meaning |
| --- | --- |
| $\phi_i$ | anchor of region $i$, its own; passed as `params` |
| $\bar\Delta_G$ | mean over the group of anchor - local |
| $\bar\phi_G$ | mean over the group of the anchors; passed as `group_anchor` |
| $\delta_i$ | outer momentum of region $i$ (points along the step), fp32, starts at zero |
| $\alpha, \beta, \gamma$ | momentum, outer learning rate, pull towards the group |

Source: NoLoCo, arXiv 2506.10911, the outer step (section 3 of the paper; equation number not
verified).

Differs from the paper: the published code ties $\gamma$ to $\beta$ and calls the rule Nesterov
although it has no look-ahead. That form is `heavy_ball` here; `nesterov` has the same terms with a
look-ahead.

For a region without a partner the caller passes its own pseudo-gradient and its own anchor; the
pull is then zero. Whether coefficients keep the regions together depends on the group size and on
the number of regions; `check_stability` checks it, this rule does not.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.outer.precision import in_fp32, widen
from lowcomm_jax.refused import in_range, one_of, refuse

PyTree = Any
Variant = Literal["heavy_ball", "nesterov"]
VARIANTS = ("heavy_ball", "nesterov")


class GossipState(NamedTuple):
    """Outer momentum of one region: an fp32 tree like the parameters, along the step."""

    momentum: PyTree


def gossip_problems(alpha: float, beta: float, gamma: float, variant: str) -> list[str]:
    """What is out of range, one line each with its fix, whatever the number of regions."""
    checks = [
        in_range("alpha", alpha, 0.0, 1.0, open_high=True),
        in_range("beta", beta, 0.0, float("inf")),
        in_range("gamma", gamma, 0.0, float("inf")),
        one_of("variant", variant, VARIANTS),
    ]
    return [problem for problem in checks if problem is not None]


def gossip(
    alpha: float, beta: float, gamma: float, variant: Variant = "heavy_ball"
) -> optax.GradientTransformationExtraArgs:
    """Step along the group's pseudo-gradient and towards the group's mean anchor.

    Args:
      alpha: momentum, in [0, 1).
      beta: outer learning rate, not negative.
      gamma: pull towards the group, not negative; see `check_stability` for its upper limit.
      variant: "heavy_ball" (as published in code) or "nesterov" (look-ahead).

    Returns:
      A transform of the group's mean pseudo-gradient (any tree; fp32 arithmetic and state). It
      needs ``params``, the region's own anchor, and the keyword ``group_anchor``, a tree like it.

    Raises:
      ValueError: an argument is out of range (all are listed), or ``params`` is missing at update.

    >>> import jax.numpy as jnp
    >>> rule = gossip(alpha=0.5, beta=0.25, gamma=0.5)
    >>> anchor, group_anchor = jnp.array([2.0]), jnp.array([1.0])
    >>> step, state = rule.update(
    ...     jnp.array([1.0]), rule.init(anchor), anchor, group_anchor=group_anchor)
    >>> step                                                    # -0.25 * 1 - 0.5 * (2 - 1)
    Array([-0.75], dtype=float32)
    """
    refuse("gossip", gossip_problems(alpha, beta, gamma, variant))

    def init(params):
        return GossipState(momentum=jax.tree.map(jnp.zeros_like, params))

    def update(mean_delta, state, params=None, *, group_anchor, **extra):
        del extra
        if params is None:
            raise ValueError("gossip needs the region's own anchor: pass it as params")
        force = jax.tree.map(
            lambda d, own, mean: -beta * d - gamma * (own - mean),
            mean_delta,
            params,
            widen(group_anchor),
        )
        moved = jax.tree.map(lambda v, f: alpha * v + f, state.momentum, force)
        if variant == "heavy_ball":
            return moved, GossipState(moved)
        return jax.tree.map(lambda v, f: alpha * v + f, moved, force), GossipState(moved)

    return in_fp32(optax.GradientTransformationExtraArgs(init, update))
