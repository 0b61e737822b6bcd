r"""Nesterov momentum on the reduced pseudo-gradient: the outer rule of DiLoCo.

$$v \leftarrow \mu v + \bar\Delta, \qquad
  \Theta \leftarrow \Theta - \eta\,(\bar\Delta + \mu v)$$

| symbol | meaning |
| --- | --- |
| $\bar\Delta$ | mean over regions of anchor - local (a gradient-like direction) |
| $v$ | outer momentum, fp32, starts at zero |
| $\Theta$ | anchor |
| $\eta$ | `learning_rate` |
| $\mu$ | `momentum` |

Source: DiLoCo, arXiv 2311.08105, Algorithm 1 (OuterOpt); written out in arXiv 2401.09135, eq. 4.

Differs from the paper: in nothing. No dampening, bias correction, decay or clipping, so the first
step moves $(1 + \mu)\,\eta\,\bar\Delta$ and not $\eta\,\bar\Delta$.
"""

import optax

from lowcomm_jax.outer.precision import in_fp32
from lowcomm_jax.refused import rates, refuse


def nesterov(
    learning_rate: optax.ScalarOrSchedule = 0.7, momentum: float = 0.9
) -> optax.GradientTransformationExtraArgs:
    """Step along the pseudo-gradient with Nesterov look-ahead.

    Args:
      learning_rate: outer learning rate; a schedule is counted in outer rounds, not inner steps.
      momentum: weight of the old momentum, in [0, 1).

    Returns:
      A transform of the mean pseudo-gradient (any tree, any shapes; fp32 arithmetic and state).
      anchor + updates is the new anchor. Its state is that of ``optax.sgd``.

    Raises:
      ValueError: the learning rate is negative or the momentum outside [0, 1).

    >>> import jax.numpy as jnp
    >>> rule = nesterov(0.5, 0.8)
    >>> update, state = rule.update(jnp.ones(2), rule.init(jnp.zeros(2)))
    >>> update                                                  # -(1 + 0.8) * 0.5
    Array([-0.9, -0.9], dtype=float32)
    """
    refuse("nesterov", rates(learning_rate, momentum))
    return in_fp32(optax.sgd(learning_rate, momentum=momentum, nesterov=True))
