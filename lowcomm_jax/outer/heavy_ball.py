r"""Heavy-ball momentum on the reduced pseudo-gradient.

$$v \leftarrow \mu v + \bar\Delta, \qquad \Theta \leftarrow \Theta - \eta\,v$$

| symbol | meaning |
| --- | --- |
| $\bar\Delta$ | mean over regions of anchor - local |
| $v$ | outer momentum, fp32, starts at zero |
| $\Theta$ | anchor |
| $\eta$ | `learning_rate` |
| $\mu$ | `momentum` |

Source: the momentum variant (SGDM) of the outer optimizers searched in DiLoCo, arXiv 2311.08105,
Algorithm 1. With one group of all regions it is also the outer step of NoLoCo, arXiv 2506.10911.

Differs from the paper: in nothing. Some published code calls this rule Nesterov although it has no
look-ahead.
"""

import optax

from lowcomm_jax.outer.precision import in_fp32
from lowcomm_jax.refused import rates, refuse


def heavy_ball(
    learning_rate: optax.ScalarOrSchedule, momentum: float
) -> optax.GradientTransformationExtraArgs:
    """Step along the momentum of the pseudo-gradient, without look-ahead.

    Args:
      learning_rate: outer learning rate; a schedule is counted in outer rounds.
      momentum: weight of the old momentum, in [0, 1).

    Returns:
      A transform of the mean pseudo-gradient (any tree; fp32 arithmetic and state).

    Raises:
      ValueError: the learning rate is negative or the momentum outside [0, 1).

    >>> import jax.numpy as jnp
    >>> rule = heavy_ball(0.5, 0.8)
    >>> state = rule.init(jnp.zeros(2))
    >>> update, state = rule.update(jnp.ones(2), state)
    >>> update, state = rule.update(jnp.ones(2), state)
    >>> update                                                  # -0.5 * (1 + 0.8)
    Array([-0.9, -0.9], dtype=float32)
    """
    refuse("heavy_ball", rates(learning_rate, momentum))
    return in_fp32(optax.sgd(learning_rate, momentum=momentum, nesterov=False))
