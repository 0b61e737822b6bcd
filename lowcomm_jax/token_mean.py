"""Tokens as weights: the mean over microbatches whose number is known only when the step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def weighted_mean(
    one: Callable[[Any, PyTree], tuple[PyTree, jax.Array, PyTree]], buffers: PyTree, count
) -> tuple[PyTree, jax.Array, PyTree]:
    """Mean over microbatches 0 to count - 1, weighted by their tokens; sums in fp32.

    A microbatch without tokens counts for nothing, even when its values are not finite; without
    any tokens the mean is 0.

    Args:
      one: `(i, buffers) -> (float leaves, tokens, buffers)` of microbatch i; buffers are handed on.
      buffers: before microbatch 0.
      count: at least 1; may be traced.

    Returns:
      (fp32 means, float32 sum of tokens, buffers after the last).
    """

    def weighted(i, buffers):
        values, tokens, buffers = one(i, buffers)
        values = jax.tree.map(lambda x: x.astype(jnp.float32) * tokens, values)
        return jax.tree.map(lambda x: jnp.where(tokens > 0, x, 0.0), values), tokens, buffers

    def body(i, carry):
        sums, total, buffers = carry
        values, tokens, buffers = weighted(i, buffers)
        return jax.tree.map(jnp.add, sums, values), total + tokens, buffers

    like = jax.eval_shape(weighted, 0, buffers)[0]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    start = (zeros, jnp.float32(0), buffers)
    sums, total, buffers = jax.lax.fori_loop(0, count, body, start)
    share = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
    return jax.tree.map(lambda x: x * share, sums), total, buffers


@jax.jit
def restart_count(tokens_RxK: jax.Array, mask_R: jax.Array, p: jax.Array) -> jax.Array:
    """Zero the tokens since the last send of fragment p in the regions that sent it."""
    return tokens_RxK.at[:, p].set(jnp.where(mask_R, 0.0, tokens_RxK[:, p]))
