r"""Outer momentum as an exponential average, with a look-ahead to hand out (arXiv 2606.00271).

$$m \leftarrow \mu\, m + (1 - \mu)\,\bar\Delta, \qquad
  \Theta \leftarrow \Theta - \eta\,(\bar\Delta + \mu\, m), \qquad
  \text{handed out: } \Theta - \eta\,\mu\, m$$

| symbol | meaning |
| --- | --- |
| $\bar\Delta$ | merged pseudo-gradient |
| $m$ | outer momentum, fp32, starts at zero |
| $\eta$ | `learning_rate` |
| $\mu$ | `momentum` |

Source: HeLoCo's published code (of the paper only notes were read). In `outer.nesterov` the
momentum is a sum, not an average.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.optimizers import state_field
from lowcomm_jax.outer.precision import in_fp32
from lowcomm_jax.refused import rates, refuse

PyTree = Any


class MomentumAverageState(NamedTuple):
    """State of `momentum_average`: fp32, a tree like the parameters."""

    momentum: PyTree


def momentum_average(
    learning_rate: float = 0.7, momentum: float = 0.9
) -> optax.GradientTransformationExtraArgs:
    """Step along the pseudo-gradient and an exponential average of all of them so far.

    Args:
      learning_rate: outer learning rate, a constant, since `look_ahead` needs the same one.
      momentum: weight of the old momentum, in [0, 1).

    Returns:
      A transform of the merged pseudo-gradient (any tree; fp32 arithmetic and state).

    Raises:
      ValueError: an argument is out of range; all violations are listed.

    >>> import jax.numpy as jnp
    >>> rule = momentum_average(0.5, 0.8)
    >>> update, state = rule.update(jnp.ones(2), rule.init(jnp.zeros(2)))
    >>> update                                                  # -0.5 * (1 + 0.8 * 0.2)
    Array([-0.58, -0.58], dtype=float32)
    """
    refuse("momentum_average", rates(learning_rate, momentum))

    def init(params):
        return MomentumAverageState(jax.tree.map(jnp.zeros_like, params))

    def update(delta, state, params=None, **extra):
        del params, extra
        renewed = jax.tree.map(
            lambda m, d: momentum * m + (1 - momentum) * d, state.momentum, delta
        )
        updates = jax.tree.map(lambda d, m: -learning_rate * (d + momentum * m), delta, renewed)
        return updates, MomentumAverageState(renewed)

    return in_fp32(optax.GradientTransformationExtraArgs(init, update))


def look_ahead(learning_rate: float, momentum: float) -> Callable[[PyTree, PyTree], PyTree]:
    """What a method hands out instead of the anchor: the anchor after one more momentum step.

    Args:
      learning_rate, momentum: as given to `momentum_average`.

    Returns:
      `(anchor, outer state) -> values`, for `Method.hands_out`; both trees are of one anchor.
    """

    def handed_out(anchor: PyTree, outer_state: PyTree) -> PyTree:
        ahead = state_field(outer_state, "momentum")
        return jax.tree.map(lambda x, m: x - learning_rate * momentum * m, anchor, ahead)

    return handed_out
