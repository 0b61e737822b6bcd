r"""Clip the outer update by its global norm.

$$U \leftarrow U \cdot \min\!\big(1,\; c / \lVert U \rVert_2\big)$$

| symbol | meaning |
| --- | --- |
| $U$ | the outer update, all leaves of the tree (a fragment) together |
| $c$ | `max_norm` |

Source: global-norm clipping, arXiv 1211.5063, Algorithm 1, applied to the outer update.

Differs from the paper: it is the update that is clipped, after the outer rule, and not a gradient;
momentum inside the rule keeps the unclipped history. The published outer steps are not clipped.
"""

import optax

from lowcomm_jax.outer.precision import in_fp32
from lowcomm_jax.refused import in_range, refuse


def clip_update(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Shorten an outer update whose norm exceeds ``max_norm``; chain it after the outer rule.

    Args:
      max_norm: largest L2 norm over all leaves, in parameter units, positive.

    Returns:
      A transform of outer updates (any tree; fp32 arithmetic, no state).

    Raises:
      ValueError: max_norm is not positive.

    >>> import jax.numpy as jnp, optax
    >>> from lowcomm_jax.outer import sgd
    >>> rule = optax.chain(sgd(1.0), clip_update(2.5))
    >>> rule.update(jnp.array([3.0, 4.0]), rule.init(jnp.zeros(2)))[0]
    Array([-1.5, -2. ], dtype=float32)
    """
    refuse("clip_update", [in_range("max_norm", max_norm, 0.0, float("inf"), open_low=True)])
    return in_fp32(optax.clip_by_global_norm(max_norm))
