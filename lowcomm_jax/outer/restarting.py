r"""Outer momentum that starts anew every K rounds (arXiv 2605.28585).

$$m' = \beta\, m + (1 - \beta)\,\bar\Delta, \qquad
  \Theta \leftarrow \Theta - \nu\,\bigl((1 + \beta)\, m' - \beta\, m\bigr), \qquad
  m \leftarrow \begin{cases} 0 & \text{after every $K$-th round} \\ m' & \text{else} \end{cases}$$

| symbol | meaning |
| --- | --- |
| $\bar\Delta$ | merged pseudo-gradient |
| $m$ | outer momentum, fp32, starts at zero |
| $\nu$ | `learning_rate` |
| $\beta$ | `momentum` |
| $K$ | `every` |

Source: notes of a replication, where $K$ and the rates are from; of the paper only the abstract was
read.

Differs from the notes: rounds are those of the fragment, as the engine counts them. A round that
moves no anchor (no region counted) counts, too; a restart due there comes at the next round that
does.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.outer.precision import in_fp32
from lowcomm_jax.refused import in_range, rates, refuse

PyTree = Any


class RestartingState(NamedTuple):
    """State of `restarting`.

    Attributes:
      momentum: fp32, a tree like the parameters.
      restarts: int32 scalar, how many restarts were due before the last round.
    """

    momentum: PyTree
    restarts: jax.Array


def restarting(
    learning_rate: float = 0.9, momentum: float = 0.7, every: int = 3
) -> optax.GradientTransformationExtraArgs:
    """Step along a momentum that is set to zero every `every` rounds.

    Args:
      learning_rate: outer learning rate.
      momentum: weight of the old momentum, in [0, 1).
      every: rounds between two restarts; 1 = no momentum is ever carried over.

    Returns:
      A transform of the merged pseudo-gradient (any tree; fp32 arithmetic and state). Its `update`
      must be told `round` (int, from 0), as an engine does.

    Raises:
      ValueError: an argument is out of range; all violations are listed.

    >>> import jax.numpy as jnp
    >>> rule = restarting(0.5, 0.8, every=2)
    >>> state = rule.init(jnp.zeros(1))
    >>> for n in range(3):                                      # -0.5 * (1.8 m' - 0.8 m)
    ...     update, state = rule.update(jnp.ones(1), state, round=n)
    ...     print(f"{update[0]:.3f}")                           # the third as the first
    -0.180
    -0.244
    -0.180
    """
    refuse(
        "restarting",
        [
            *rates(learning_rate, momentum),
            in_range("every", every, 1, float("inf")),
            None if every == int(every) else f"every={every}: give a whole number of rounds",
        ],
    )

    def init(params):
        return RestartingState(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(delta, state, params=None, *, round, **extra):
        del params, extra
        restarts = jnp.asarray(round, jnp.int32) // int(every)
        goes_on = restarts == state.restarts
        old = jax.tree.map(lambda m: jnp.where(goes_on, m, jnp.zeros_like(m)), state.momentum)
        new = jax.tree.map(lambda m, d: momentum * m + (1 - momentum) * d, old, delta)
        updates = jax.tree.map(
            lambda m, n: -learning_rate * ((1 + momentum) * n - momentum * m), old, new
        )
        return updates, RestartingState(new, restarts)

    return in_fp32(optax.GradientTransformationExtraArgs(init, update))
