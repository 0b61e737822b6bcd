"""Pipeline stages inside a region: collectives over the `stage` axis, and GPipe's schedule.

A region's program sees its stages by a `shard_map` that is manual over `stage` alone; `fsdp` and
`tensor` stay with the compiler. It works in a program of its own and, nested, inside the program
that `Regions.lift` has made manual over `region`. All sums are fp32: a bfloat16 reduction in a
partly manual program aborts XLA on CPU (jax 0.10), in the forward as in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

STAGE = "stage"
PyTree = Any


def over_stages(fn: Callable, mesh: Mesh, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """`shard_map` of one stage's function over the stages of `mesh`.

    Args:
      fn: gets its own part of a leaf whose spec names `stage`, and the whole of other leaves.
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
            # Values that come from another region (`pipeline_paths`) cannot be proved equal.
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
    """`x` of the stage before this one; zeros in the first stage."""
    return jax.lax.ppermute(x, STAGE, [(s, s + 1) for s in range(stages - 1)])


def hand_back(x: jax.Array, stages: int) -> jax.Array:
    """`x` of the stage after this one; zeros in the last stage."""
    return jax.lax.ppermute(x, STAGE, [(s + 1, s) for s in range(stages - 1)])


def gpipe(
    apply: Callable[[PyTree], PyTree],
    x_M: PyTree,
    stages: int,
    hand_on: Callable[[PyTree, jax.Array], PyTree] | None = None,
) -> PyTree:
    """Pass M microbatches through the stages, from within one of them.

    In tick t stage s works on microbatch t - s and passes its result to stage s + 1. The backward
    pass, made by differentiation, runs the same ticks in reverse. There are M + S - 1 ticks, of
    which S - 1 are idle for each stage (`bubble`). Every device runs the same program: in its idle
    ticks a stage computes on zeros, and nothing reads the result.

    Source: GPipe, arXiv 1811.06965, section 2.

    Args:
      apply: this stage's layers, from one microbatch to values of its shape and dtype; finite on
        zeros, and so must its derivatives be.
      x_M: inputs of the first stage, leaves `[M, ...]`; the other stages read their shape only.
      stages: S.
      hand_on: (values, int32 tick) -> values of the stage before this one; default `pass_on`.
        `pipeline_paths.Paths.hand_on` takes them from another region.

    Returns:
      Leaves `[M, ...]`: in the last stage the results of all stages; elsewhere without meaning.
    """
    first = index() == 0
    hand_on = hand_on or (lambda y, tick: pass_on(y, stages))

    def work(held, x_and_tick):
        x, tick = x_and_tick
        y = apply(jax.tree.map(functools.partial(jnp.where, first), x, held))
        return hand_on(y, tick), y

    def with_idle(x):
        return jnp.concatenate([x, jnp.zeros((stages - 1, *x.shape[1:]), x.dtype)])

    fed_T, held = jax.tree.map(with_idle, x_M), jax.tree.map(lambda x: jnp.zeros_like(x[0]), x_M)
    ticks = len(jax.tree.leaves(fed_T)[0])
    y_T = jax.lax.scan(work, held, (fed_T, jnp.arange(ticks)))[1]
    return jax.tree.map(lambda y: y[stages - 1 :], y_T)


def bubble(stages: int, microbatches: int) -> float:
    """Share of the ticks in which a stage is idle: (S - 1) / (M + S - 1)."""
    return (stages - 1) / (microbatches + stages - 1)
