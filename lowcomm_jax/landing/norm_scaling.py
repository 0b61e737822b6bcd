r"""The correction factor whose size does not depend on units: strength relative to the gradient.

$$f = \operatorname{clip}(\lambda\, g \odot D,\; -1,\; 1), \qquad
  \lambda = \lambda_0\,\frac{\lVert g \rVert}{\lVert g \odot g \odot D \rVert}$$

with the norms over one tensor or over one fragment. Before the clip the correction
$g \odot f$ has norm $\lambda_0 \lVert g \rVert$; the clip keeps $g + g \odot f$ from turning round.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Leaves = list[jax.Array]


def norm_scaled_factors(
    g: Leaves, displacement: Leaves, strength: Leaves, batch_axes: list[int] | None
) -> Leaves:
    """Compute f for every leaf.

    Args:
      g: mean gradient over the flight, fp32 leaves; its unit does not matter.
      displacement: leaves like g.
      strength: lambda_0 for every leaf, broadcastable to it.
      batch_axes: number of leading axes of every leaf over which separate tensors are stacked;
        None takes all norms over all leaves together.

    Returns:
      Leaves like g, elements in [-1, 1]; 0 where g or the displacement vanishes.
    """
    reduce_ = _over_fragment if batch_axes is None else _over_tensors(batch_axes)
    # Divided by their largest element first: squares of squares of an AdamW step underflow in fp32.
    g = _divide(g, reduce_(_peak, jnp.maximum, g))
    displacement = _divide(displacement, reduce_(_peak, jnp.maximum, displacement))
    quadratic = [x * x * d for x, d in zip(g, displacement, strict=True)]
    squares = reduce_(_sum_of_squares, jnp.add, g)
    quadratic_squares = reduce_(_sum_of_squares, jnp.add, quadratic)
    ratios = [
        jnp.where(below > 0, jnp.sqrt(above / jnp.where(below > 0, below, 1.0)), 0.0)
        for above, below in zip(squares, quadratic_squares, strict=True)
    ]
    return [
        jnp.clip(s * ratio * x * d, -1.0, 1.0)
        for s, ratio, x, d in zip(strength, ratios, g, displacement, strict=True)
    ]


def _peak(leaf: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.max(jnp.abs(leaf), axis=axes, keepdims=True, initial=0.0)


def _sum_of_squares(leaf: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sum(leaf * leaf, axis=axes, keepdims=True)


def _divide(leaves: Leaves, peaks: Leaves) -> Leaves:
    return [x / jnp.where(peak > 0, peak, 1.0) for x, peak in zip(leaves, peaks, strict=True)]


def _over_tensors(batch_axes: list[int]) -> Callable[..., Leaves]:
    def reduce_(statistic, _merge, leaves):
        return [
            statistic(leaf, tuple(range(stacked, leaf.ndim)))
            for leaf, stacked in zip(leaves, batch_axes, strict=True)
        ]

    return reduce_


def _over_fragment(statistic, merge, leaves: Leaves) -> Leaves:
    total = jnp.zeros((), jnp.float32)
    for leaf in leaves:
        total = merge(total, statistic(leaf, tuple(range(leaf.ndim))).reshape(()))
    return [total] * len(leaves)
