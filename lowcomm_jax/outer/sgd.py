r"""Plain descent along the reduced pseudo-gradient.

$$\Theta \leftarrow \Theta - \eta\,\bar\Delta$$

| symbol | meaning |
| --- | --- |
| $\bar\Delta$ | mean over regions of anchor - local |
| $\Theta$ | anchor |
| $\eta$ | `learning_rate` |

Source: one of the outer optimizers of DiLoCo, arXiv 2311.08105, Algorithm 1; the outer step of
AdLoCo (arXiv 2508.18182, rate 0.5).

Differs from the paper: in nothing.
"""

import optax

from lowcomm_jax.outer.precision import in_fp32
from lowcomm_jax.refused import in_range, refuse


def sgd(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformationExtraArgs:
    """Step along the pseudo-gradient.

    Args:
      learning_rate: outer learning rate; a schedule is counted in outer rounds.

    Returns:
      A transform of the mean pseudo-gradient (any tree; fp32 arithmetic).

    Raises:
      ValueError: the learning rate is negative.

    >>> import jax.numpy as jnp
    >>> rule = sgd(0.25)
    >>> rule.update(jnp.ones(2), rule.init(jnp.zeros(2)))[0]
    Array([-0.25, -0.25], dtype=float32)
    """
    refuse("sgd", [in_range("learning_rate", learning_rate, 0.0, float("inf"))])
    return in_fp32(optax.sgd(learning_rate))
