r"""Put the progress made in flight on top of the new anchor.

$$\theta \leftarrow \Theta' + T(u), \qquad T(u) = u = \theta - s$$

| symbol | meaning |
| --- | --- |
| $\theta$ | local parameters |
| $s$ | snapshot of the local parameters at the send |
| $\Theta'$ | anchor after the outer step |

Source: CoCoDC, arXiv 2504.17672, delay compensation with strength 0.

Differs from the paper: the paper always adds its quadratic term (`taylor_delay_correction`). With a
fixed strength in parameter units that term is mostly below fp32 rounding, so that this rule
remains.
"""

import optax

from lowcomm_jax.outer.precision import in_fp32


def replay() -> optax.GradientTransformationExtraArgs:
    """Keep the progress made while the payload travelled.

    Returns:
      A transform of the in-flight progress (any tree) that returns it unchanged.

    >>> import jax.numpy as jnp
    >>> rule = replay()
    >>> rule.update(jnp.ones(2), rule.init(jnp.zeros(2)), displacement=jnp.ones(2), staleness=3)[0]
    Array([1., 1.], dtype=float32)
    """
    return in_fp32(optax.identity())
