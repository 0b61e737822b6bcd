r"""Delayed Nesterov: momentum for pseudo-gradients that arrive one at a time.

On the arrival of $\Delta_t$, with $q$ the arrivals already in the window:

$$b \leftarrow b + \Delta_t$$
$$q + 1 = N:\quad v \leftarrow \mu v + \tfrac1N b,\quad
  \Theta \leftarrow \Theta - \eta\big((1 - cN + c)\,\mu v + \tfrac1N \Delta_t\big),\quad
  b \leftarrow 0,\; q \leftarrow 0$$
$$\text{else}:\quad
  \Theta \leftarrow \Theta - \eta\big(c\,\mu v + \tfrac1N \Delta_t\big),\quad q \leftarrow q + 1$$

| symbol | meaning |
| --- | --- |
| $\Delta_t$ | pseudo-gradient of one arrival, anchor - local |
| $b$ | sum of the arrivals since the last momentum step |
| $v$ | momentum, renewed once in $N$ arrivals |
| $N$ | `buffer`, the number of arrivals in a window |
| $c$ | share of the momentum step taken at each of the other arrivals, in [0, 1/N] |
| $\eta, \mu$ | `learning_rate`, `momentum` |

Source: Asynchronous Local-SGD, arXiv 2401.09135, Algorithm 3.

Differs from the paper: the counter of the window is kept modulo $N$, so that it never overflows.

$N$ arrivals measured against one anchor, with $c = 0$, equal one synchronous Nesterov step of rate
$\eta$ on their mean. The factor $1/N$ is inside the rule: give $\eta$ without it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.outer.precision import in_fp32
from lowcomm_jax.refused import in_range, rates, refuse

PyTree = Any


class DelayedNesterovState(NamedTuple):
    """State of `delayed_nesterov`; counters are int32 scalars, trees are fp32.

    arrivals: arrivals seen so far (saturates at the largest int32).
    pending: arrivals in the open window, in [0, buffer).
    momentum, pending_sum: trees like the parameters.
    """

    arrivals: jax.Array
    pending: jax.Array
    momentum: PyTree
    pending_sum: PyTree


def delayed_nesterov(
    learning_rate: optax.ScalarOrSchedule, momentum: float, buffer: int, c: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """Descend along each arrival at once and renew the momentum every ``buffer`` arrivals.

    Args:
      learning_rate: outer learning rate; a schedule is counted in arrivals.
      momentum: weight of the old momentum, in [0, 1).
      buffer: arrivals in a window (usually the number of regions), at least 1.
      c: share of the momentum applied at the arrivals that do not close a window, in
        [0, 1 / buffer]; 0 applies it only when a window closes.

    Returns:
      A transform of one region's pseudo-gradient (any tree; fp32 arithmetic and state). Which
      branch applies is decided on the device from a counter in the state.

    Raises:
      ValueError: an argument is out of range; all violations are listed.

    >>> import jax.numpy as jnp
    >>> rule = delayed_nesterov(0.5, 0.8, buffer=2)
    >>> state = rule.init(jnp.zeros(()))
    >>> first, state = rule.update(jnp.float32(1.0), state)     # -0.5 * 1 / 2
    >>> second, state = rule.update(jnp.float32(3.0), state)    # -0.5 * (0.8 * 2 + 3 / 2)
    >>> print(f"{first:.2f} {second:.2f}, together {first + second:.2f}")
    -0.25 -1.55, together -1.80
    """
    refuse(
        "delayed_nesterov",
        [
            *rates(learning_rate, momentum),
            in_range("buffer", buffer, 1, float("inf")),
            None if buffer % 1 == 0 else f"buffer={buffer}: give a whole number of arrivals",
            in_range("c", c, 0.0, 1.0 / buffer) if buffer >= 1 else None,
        ],
    )
    share_when_full = 1.0 - c * buffer + c

    def init(params):
        return DelayedNesterovState(
            arrivals=jnp.zeros((), jnp.int32),
            pending=jnp.zeros((), jnp.int32),
            momentum=jax.tree.map(jnp.zeros_like, params),
            pending_sum=jax.tree.map(jnp.zeros_like, params),
        )

    def update(delta, state, params=None, **extra):
        del params, extra
        rate = learning_rate(state.arrivals) if callable(learning_rate) else learning_rate
        full = state.pending + 1 == buffer
        total = jax.tree.map(jnp.add, state.pending_sum, delta)
        renewed = jax.tree.map(
            lambda v, b: jnp.where(full, momentum * v + b / buffer, v), state.momentum, total
        )
        share = jnp.where(full, share_when_full, c) * momentum
        updates = jax.tree.map(lambda v, d: -rate * (share * v + d / buffer), renewed, delta)
        return updates, DelayedNesterovState(
            arrivals=optax.safe_increment(state.arrivals),
            pending=jnp.where(full, 0, state.pending + 1),
            momentum=renewed,
            pending_sum=jax.tree.map(lambda b: jnp.where(full, jnp.zeros_like(b), b), total),
        )

    return in_fp32(optax.GradientTransformationExtraArgs(init, update))
