r"""Eager outer updates: the region's own fresh part now, the others' part one period late.

$$g_m = \bar\Delta^{late} + w\,\Delta_m - w^{late}\,\Delta_m^{late}, \qquad
  \Theta_m \leftarrow \Theta_m + \mathrm{inner\_rule}(g_m)$$

| symbol | meaning |
| --- | --- |
| $\bar\Delta^{late}$ | mean pseudo-gradient of the previous period, just arrived; 0 in the first |
| $\Delta_m$ | own pseudo-gradient of this period, as the others will decode it (`own`) |
| $\Delta_m^{late}$ | own part inside $\bar\Delta^{late}$, as the others decoded it (`own_late`) |
| $w, w^{late}$ | weight of the region in the mean of this and of the previous period |
| $\Theta_m$ | anchor of region $m$, its own |

Source: Eager updates for overlapped communication, arXiv 2502.12996, Algorithm 3.

Differs from the paper: the weights are arguments (the paper has $1/M$), so that absent regions and
token weights work.

The product $w\,\Delta_m$ that one period adds must be the one that the next period subtracts; then
differences between the anchors do not add up. With plain descent of rate $\eta$ an anchor differs
from their mean by $-\eta\,(w\Delta_m - \overline{w\Delta})$ after every period, however many there
were.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.outer.precision import in_fp32, widen

PyTree = Any


def eager(inner_rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Swap the late own part of the mean for the fresh one, then apply ``inner_rule``.

    Args:
      inner_rule: outer rule for the mixed pseudo-gradient, for example ``nesterov(0.4, 0.9)``;
        extra arguments are handed on to it.

    Returns:
      A transform of the late mean pseudo-gradient (any tree; fp32 arithmetic) with the keywords
      ``own`` and ``own_late`` (trees like it), ``weight`` (scalar) and ``weight_late`` (scalar,
      equal to ``weight`` if not given). Its state is that of ``inner_rule``.

    >>> import jax.numpy as jnp
    >>> from lowcomm_jax.outer import sgd
    >>> rule = eager(sgd(1.0))
    >>> late_mean, own, own_late = jnp.array([2.0]), jnp.array([4.0]), jnp.array([1.0])
    >>> rule.update(
    ...     late_mean, rule.init(own), own=own, own_late=own_late, weight=0.25)[0]
    Array([-2.75], dtype=float32)
    """
    inner = in_fp32(inner_rule)

    def update(late_mean, state, params=None, *, own, own_late, weight, weight_late=None, **extra):
        fresh = jnp.asarray(weight, jnp.float32)
        stale = fresh if weight_late is None else jnp.asarray(weight_late, jnp.float32)
        mixed = jax.tree.map(
            lambda late, new, old: late + fresh * new - stale * old,
            late_mean,
            widen(own),
            widen(own_late),
        )
        return inner.update(mixed, state, params, **extra)

    return in_fp32(optax.GradientTransformationExtraArgs(inner.init, update))
