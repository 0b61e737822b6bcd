"""Bytes of a device that a step of a given microbatch needs, by the compiler's own analysis."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from lowcomm_jax import microbatches
from lowcomm_jax.engine import Engine
from lowcomm_jax.network.memory import compiled_memory
from lowcomm_jax.offload import HOST
from lowcomm_jax.programs import accumulating_program
from lowcomm_jax.regions import REGION
from lowcomm_jax.state import TrainState

PyTree = Any


def step_bytes(
    engine: Engine, state: TrainState, batch: PyTree, microbatch: int, trainers: int = 1
) -> int:
    """Bytes on the fullest device while inner steps of one microbatch size run.

    The compiler's sum of arguments (inner state of the regions a device holds, and the staged
    buffer), results and temporaries, and beside it the state that only sends and landings touch.
    What sends and landings need themselves, while no activations are alive, is not counted. Each
    call compiles a step and keeps nothing of it.

    Args:
      batch: host batch `[R, b, ...]`; its shapes and dtypes count, its b does not.
      microbatch: m.
      trainers: how many such states are stacked, for one program to step them all.

    Raises:
      ValueError: microbatches the engine cannot run.
    """
    microbatches.refuse(microbatches.size_problems(engine.recipe, [microbatch]))
    programs, count = engine.trips(state).programs, engine.regions.count * trainers
    placed = (
        None if engine.regions.mesh.size == 1 else engine.regions.sharding(REGION, None, "fsdp")
    )

    def stacked(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=x.sharding)

    def staged(x: Any) -> jax.ShapeDtypeStruct:
        x = np.asarray(x)
        shape = (count, engine.block, microbatch, *x.shape[2:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=placed)

    active = jax.ShapeDtypeStruct((count, engine.block), bool)
    counts = jax.ShapeDtypeStruct((count,), np.int32)
    whole = jax.ShapeDtypeStruct((), np.int32) if trainers == 1 else counts
    needed = compiled_memory(
        accumulating_program(programs.recipe, programs.step, programs.specs, trainers),
        jax.tree.map(stacked, state.inner),
        jax.tree.map(_abstract, state.frozen),
        jax.tree.map(staged, batch),
        stacked(engine.region_ids),
        active if engine.method.schedule.uneven else None,
        counts,
        whole,
        whole,
    )
    beside = (state.anchor, state.received, state.outer, state.codec, state.landing)
    return needed["total"] + trainers * device_bytes(beside)


def device_bytes(tree: PyTree) -> int:
    """Bytes of a tree of arrays on one device; what is offloaded to the host does not count."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def _shard_bytes(x: jax.Array) -> int:
    if x.sharding.memory_kind == HOST:
        return 0
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
