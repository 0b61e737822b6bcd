"""Gradient accumulation over a number of microbatches that is known only when the step runs.

The number of microbatches is a traced bound, so that a growing batch recompiles nothing; only
another microbatch size makes another program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lowcomm_jax.regions import Regions

if TYPE_CHECKING:
    from lowcomm_jax.inner import InnerStep

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


def make_accumulating_program(step: InnerStep, regions: Regions):
    """Build the program of inner steps of several microbatches each, not yet jitted.

    Returns:
      `block(inner, frozen, batches, region_ids, active, counts_R, stride, n)`: runs the first n
      steps of a staged buffer of C microbatches, leaves `[R, C, m, ...]`. Step t of region r takes
      the microbatches [t stride, t stride + counts_R[r]); n, stride and counts_R are traced.
      `active` is None or bool `[R, C]` (by step). Returns (inner, metrics `[R, C]` by step).
    """

    def region_step(inner, frozen, batches, region, moving, first, count):
        def part(i):
            return jax.tree.map(lambda x: x[first + i], batches)

        new, metrics = step.over_microbatches(inner, frozen, part, count, region)
        if moving is not None:
            new = jax.tree.map(lambda a, b: jnp.where(moving, a, b), new, inner)
            metrics["tokens"] = jnp.where(moving, metrics["tokens"], 0.0)
        return new, metrics

    def region_block(carry, frozen, batches, region, active, count, stride, n):
        def body(t, carry):
            inner, log = carry
            moving = None if active is None else active[t]
            inner, new = region_step(inner, frozen, batches, region, moving, t * stride, count)
            return inner, jax.tree.map(lambda buffer, v: buffer.at[t].set(v), log, new)

        return jax.lax.fori_loop(0, n, body, carry)

    lifted_step = regions.lift(region_step, (0, None, 0, 0, 0, None, 0))
    lifted_block = regions.lift_update(region_block, (0, None, 0, 0, 0, 0, None, None))

    def block(inner, frozen, batches, region_ids, active, counts_R, stride, n):
        moving = None if active is None else active[:, 0]
        args = (inner, frozen, batches, region_ids, moving, stride, counts_R)
        shapes = jax.eval_shape(lifted_step, *args)[1]
        capacity = jax.tree.leaves(batches)[0].shape[1]
        log = jax.tree.map(lambda s: jnp.zeros((s.shape[0], capacity), s.dtype), shapes)
        return lifted_block((inner, log), frozen, batches, region_ids, active, counts_R, stride, n)

    return block
