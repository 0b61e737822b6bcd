r"""Mix the local values with the new anchor.

$$\theta \leftarrow \alpha\,\theta + (1 - \alpha)\,\Theta' = \Theta' + T(u), \qquad
  T(u) = \alpha\,(u - D)$$

| symbol | meaning |
| --- | --- |
| $\theta$ | local parameters |
| $s$ | snapshot of the local parameters at the send |
| $u = \theta - s$ | local progress since the send |
| $\Theta'$ | anchor after the outer step |
| $D = \Theta' - s$ | displacement of the anchor, seen from the snapshot |
| $\alpha$ | weight of the *local* value |

Source: Streaming DiLoCo, arXiv 2501.18512, Algorithm 2 (the last line of the receive).

Differs from the paper: in nothing. The next pseudo-gradient is measured from the shared anchor. So
the share $\alpha\,(s - \Theta')$ of drift that was already averaged is counted again; `replay` does
not do that.
"""

import jax
import optax

from lowcomm_jax.outer.precision import in_fp32, widen
from lowcomm_jax.refused import in_range, refuse


def blend(alpha: float) -> optax.GradientTransformationExtraArgs:
    """Land between the local value (alpha = 1) and the new anchor (alpha = 0).

    Args:
      alpha: weight of the local value, in [0, 1].

    Returns:
      A transform of the in-flight progress with the required keyword ``displacement`` (the tree of
      the progress); its output is added to the new anchor. fp32 arithmetic, no state.

    Raises:
      ValueError: alpha lies outside [0, 1].

    >>> import jax.numpy as jnp
    >>> rule = blend(0.25)
    >>> snapshot, local, anchor = jnp.zeros(2), jnp.ones(2), jnp.full(2, 5.0)
    >>> moved, _ = rule.update(
    ...     local - snapshot, rule.init(anchor), anchor, displacement=anchor - snapshot)
    >>> anchor + moved                                          # 0.25 * 1 + 0.75 * 5
    Array([4., 4.], dtype=float32)
    """
    refuse("blend", [in_range("alpha", alpha, 0.0, 1.0)])

    def init(params):
        del params
        return optax.EmptyState()

    def update(progress, state, params=None, *, displacement, **extra):
        del params, extra
        mixed = jax.tree.map(lambda u, d: alpha * (u - d), progress, widen(displacement))
        return mixed, state

    return in_fp32(optax.GradientTransformationExtraArgs(init, update))
