"""The program of inner steps that accumulate gradients over microbatches.

The number of microbatches is a traced bound, so that a growing batch recompiles nothing; only
another microbatch size makes another program.
"""

from __future__ import annotations

import jax

from lowcomm_jax.inner import InnerStep, empty_log, where_active
from lowcomm_jax.regions import Regions


def make_accumulating_program(step: InnerStep, regions: Regions, apart: bool = False):
    """Build the program of inner steps of several microbatches each, not yet jitted.

    Args:
      apart: whether stride and n are each region's own, int32 `[R]`, instead of two numbers for
        all. With `vmap` that costs a few percent.

    Returns:
      `block(inner, frozen, batches, region_ids, active, counts_R, stride, n)`: runs the first n
      steps of a staged buffer of C microbatches, leaves `[R, C, m, ...]`. Step t of region r takes
      the microbatches [t stride, t stride + counts_R[r]); n, stride and counts_R are traced.
      `active` is None or bool `[R, C]` (by step). Returns (inner, metrics `[R, C]` by step).
    """
    own = 0 if apart else None

    def region_step(inner, frozen, batches, region, moving, first, count):
        def part(i):
            return jax.tree.map(lambda x: x[first + i], batches)

        new, metrics = step.over_microbatches(inner, frozen, part, count, region)
        return where_active(moving, new, inner, metrics)

    def region_block(carry, frozen, batches, region, active, count, stride, n):
        def body(t, carry):
            inner, log = carry
            moving = None if active is None else active[t]
            inner, new = region_step(inner, frozen, batches, region, moving, t * stride, count)
            return inner, jax.tree.map(lambda buffer, v: buffer.at[t].set(v), log, new)

        return jax.lax.fori_loop(0, n, body, carry)

    lifted_step = regions.lift(region_step, (0, None, 0, 0, 0, own, 0))
    lifted_block = regions.lift_update(region_block, (0, None, 0, 0, 0, 0, own, own))

    def block(inner, frozen, batches, region_ids, active, counts_R, stride, n):
        moving = None if active is None else active[:, 0]
        args = (inner, frozen, batches, region_ids, moving, stride, counts_R)
        shapes = jax.eval_shape(lifted_step, *args)[1]
        log = empty_log(shapes, jax.tree.leaves(batches)[0].shape[1])
        return lifted_block((inner, log), frozen, batches, region_ids, active, counts_R, stride, n)

    return block
