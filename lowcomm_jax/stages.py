"""Pipeline stages inside a region: the one file that calls collectives over the `stage` axis.

Random routing (`shifts`, `route`) is the one place where activations cross regions within a step.

A region's program sees its stages by a `shard_map` that is manual over `stage` alone; `fsdp` and
`tensor` stay with the compiler. It works in a program of its own and, nested, inside the program
that `Regions.lift` has made manual over `region`. All sums are fp32: a bfloat16 reduction in a
partly manual program aborts XLA on CPU (jax 0.10), in the forward as in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

REGION, STAGE = "region", "stage"
PyTree = Any


def over_stages(fn: Callable, mesh: Mesh, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """`shard_map` of one stage's function over the stages of `mesh`.

    Args:
      fn: sees its own part of whatever a spec gives to `stage`, and all of the rest.
      mesh: used where no other `shard_map` surrounds the call; inside one, its mesh is.
      in_specs, out_specs: `PartitionSpec`s that name `stage` alone (`stage_part`). A result
        without `stage` must be equal in all stages, such as a `total`; nothing proves that it is.
    """

    def call(*args):
        surrounded = not jax.sharding.get_abstract_mesh().empty
        return jax.shard_map(
            fn,
            mesh=None if surrounded else mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={STAGE},
            # Proofs of equality end at values that come from another region (`route`).
            check_vma=False,
        )(*args)

    return call


def stage_part(spec: P) -> P:
    """The spec with `stage` alone left in it."""
    return P(*(STAGE if _holds_stage(axis) else None for axis in spec))


def stage_axis(spec: P) -> int | None:
    """The dimension that is cut over the stages; None when every stage has the whole."""
    return next((i for i, axis in enumerate(spec) if _holds_stage(axis)), None)


def _holds_stage(axis: str | tuple[str, ...] | None) -> bool:
    return axis == STAGE or (isinstance(axis, tuple) and STAGE in axis)


def index() -> jax.Array:
    """Number of this stage, int32 scalar."""
    return jax.lax.axis_index(STAGE)


def total(x: jax.Array) -> jax.Array:
    """fp32 sum over the stages, the same in all of them."""
    return jax.lax.psum(x.astype(jnp.float32), STAGE)


def largest(x: jax.Array) -> jax.Array:
    """Maximum over the stages, the same in all of them; without a gradient."""
    return jax.lax.pmax(jax.lax.stop_gradient(x), STAGE)


def whole(part: jax.Array) -> jax.Array:
    """All stages' parts of a leaf side by side along its first axis."""
    return jax.lax.all_gather(part, STAGE, axis=0, tiled=True)


def pass_on(x: jax.Array, stages: int) -> jax.Array:
    """What the stage before this one has as `x`; zeros in the first stage."""
    return jax.lax.ppermute(x, STAGE, [(s, s + 1) for s in range(stages - 1)])


def shifts(key_data: jax.Array, ticks: int, regions: int) -> jax.Array:
    """Draw by how many regions activations move on behind each tick, int32 `[T]`.

    The draw is that of region 0's key in all regions. Any two replicas of neighbouring stages are
    equally likely to meet.

    Differs from NoLoCo (arXiv 2506.10911), which draws among all permutations of the replicas:
    cyclic ones alone, which are the same for R = 2, so that a program holds R transfers, not R!.
    """
    common = jax.lax.all_gather(key_data, REGION)[0]
    return jax.random.randint(jax.random.wrap_key_data(common), (ticks,), 0, regions)


def route(x: jax.Array, shift: jax.Array, regions: int) -> jax.Array:
    """What region r - shift has as `x`, in region r; backward the same way back."""

    def moved(by):
        pairs = [(r, (r + by) % regions) for r in range(regions)]
        return lambda x: jax.lax.ppermute(x, REGION, pairs)

    return jax.lax.switch(shift, [lambda x: x, *map(moved, range(1, regions))], x)


def from_region(x_M: jax.Array, source_M: jax.Array) -> jax.Array:
    """Entry m of region source_M[m]'s `x_M`, for every m; without a gradient."""
    x_RxM = jax.lax.all_gather(jax.lax.stop_gradient(x_M), REGION)
    return x_RxM[source_M, jnp.arange(x_M.shape[0])]


def this_region() -> jax.Array:
    """Number of this region's slot of the mesh, int32 scalar."""
    return jax.lax.axis_index(REGION)


def gpipe(
    apply: Callable[[jax.Array], jax.Array],
    x_M: jax.Array,
    stages: int,
    shift_T: jax.Array | None = None,
    regions: int = 1,
) -> jax.Array:
    """Pass M microbatches through the stages, from within one of them.

    In tick t stage s works on microbatch t - s and hands what comes out to stage s + 1; the
    backward pass runs the same ticks in reverse, written by differentiation. M + S - 1 ticks, of
    which S - 1 are idle for each stage (`bubble`). Every device runs the same program: in its idle
    ticks a stage computes on zeros, and nothing reads the result.

    Source: GPipe, arXiv 1811.06965, section 2.

    Args:
      apply: this stage's layers, from one microbatch to values of its shape and dtype; finite on
        zeros, and so must its derivatives be.
      x_M: inputs `[M, ...]` of the first stage; the others look at their shape alone.
      stages: S.
      shift_T: int32 `[M + S - 1]`, random routing: behind tick t all activations move on by so
        many of the `regions` (`shifts`); microbatch m leaves stage s behind tick m + s.

    Returns:
      `[M, ...]`: in the last stage what has been through all of them; elsewhere of no use.
    """
    first = index() == 0

    def tick(held, x_and_shift):
        x, shift = x_and_shift
        y = apply(jnp.where(first, x, held))
        moved = pass_on(y, stages)
        return (moved if shift is None else route(moved, shift, regions)), y

    idle = jnp.zeros_like(x_M[:1])
    fed = jnp.concatenate([x_M, *[idle] * (stages - 1)])
    return jax.lax.scan(tick, idle[0], (fed, shift_T))[1][stages - 1 :]


def bubble(stages: int, microbatches: int) -> float:
    """Share of the ticks in which a stage is idle: (S - 1) / (M + S - 1)."""
    return (stages - 1) / (microbatches + stages - 1)
