r"""Replace the local values by the new anchor, and drop the progress made in flight.

$$\theta \leftarrow \Theta' + T(u), \qquad T(u) = 0$$

| symbol | meaning |
| --- | --- |
| $\theta$ | local parameters |
| $\Theta'$ | anchor after the outer step |
| $u$ | local progress since the send |

Source: DiLoCo, arXiv 2311.08105, Algorithm 1; Streaming DiLoCo, arXiv 2501.18512, Algorithm 2
with mixing weight 0.

Differs from the paper: in nothing.
"""

import optax

from lowcomm_jax.outer.precision import in_fp32


def replace() -> optax.GradientTransformationExtraArgs:
    """Land exactly on the new anchor.

    Returns:
      A transform of the in-flight progress (any tree) whose output, zero, is added to the anchor.

    >>> import jax.numpy as jnp
    >>> rule = replace()
    >>> rule.update(jnp.ones(2), rule.init(jnp.zeros(2)), displacement=jnp.ones(2), staleness=3)[0]
    Array([0., 0.], dtype=float32)
    """
    return in_fp32(optax.set_to_zero())
