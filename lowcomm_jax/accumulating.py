"""The program of inner steps that accumulate gradients over microbatches.

The number of microbatches is a traced bound, so that a growing batch recompiles nothing; only
another microbatch size makes another program.
"""

from __future__ import annotations

import jax

from lowcomm_jax.inner import InnerStep, empty_log, where_active
from lowcomm_jax.regions import Regions


def make_accumulating_program(step: InnerStep, regions: Regions):
    """Build the program of inner steps of several microbatches each, not yet jitted.

    Returns:
      `block(inner, frozen, batches, region_ids, active, counts_R, strides_R, steps_R)`: makes the
      first steps_R[r] steps of region r out of a staged buffer of C microbatches, leaves
      `[R, C, m, ...]`. Its step t takes the microbatches [t strides_R[r], t strides_R[r] +
      counts_R[r]); all three, int32 `[R]`, are traced. `active` is None or bool `[R, C]` (by
      step). Returns (inner, metrics `[R, C]` by step).
    """

    def region_step(inner, frozen, batches, region, moving, first, count):
        def part(i):
            return jax.tree.map(lambda x: x[first + i], batches)

        new, metrics = step.over_microbatches(inner, frozen, part, count, region)
        return where_active(moving, new, inner, metrics)

    def region_block(carry, frozen, batches, region, active, count, stride, steps):
        def body(t, carry):
            inner, log = carry
            moving = None if active is None else active[t]
            inner, new = region_step(inner, frozen, batches, region, moving, t * stride, count)
            return inner, jax.tree.map(lambda buffer, v: buffer.at[t].set(v), log, new)

        return jax.lax.fori_loop(0, steps, body, carry)

    lifted_step = regions.lift(region_step, (0, None, 0, 0, 0, 0, 0))
    lifted_block = regions.lift_update(region_block, (0, None, 0, 0, 0, 0, 0, 0))

    def block(inner, frozen, batches, region_ids, active, counts_R, strides_R, steps_R):
        moving = None if active is None else active[:, 0]
        args = (inner, frozen, batches, region_ids, moving, strides_R, counts_R)
        shapes = jax.eval_shape(lifted_step, *args)[1]
        log = empty_log(shapes, jax.tree.leaves(batches)[0].shape[1])
        given = (frozen, batches, region_ids, active, counts_R, strides_R, steps_R)
        return lifted_block((inner, log), *given)

    return block
