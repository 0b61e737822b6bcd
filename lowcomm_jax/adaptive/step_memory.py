"""How much memory a step of a given microbatch needs, by the compiler's analysis."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from lowcomm_jax.engine import Engine
from lowcomm_jax.mesh.offload import HOST
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.planner.memory import compiled_memory
from lowcomm_jax.refusals import UNFIT, microbatch_problems
from lowcomm_jax.refused import refuse
from lowcomm_jax.state.train_state import TrainState

PyTree = Any


def step_bytes(engine: Engine, state: TrainState, batch: PyTree, microbatch: int) -> int:
    """Bytes on the fullest device while inner steps of one microbatch size run.

    The compiler's sum of arguments, results and temporaries; the arguments are the inner state of
    the regions that a device holds, and the staged buffer. The state that only sends and landings
    touch comes on top. What sends and landings need themselves, while no activations are alive, is
    not counted. Each call compiles a step and keeps nothing of it.

    Args:
      batch: host batch `[R, b, ...]`; its shapes and dtypes count, its b does not.
      microbatch: m.

    Raises:
      ValueError: microbatches the engine cannot run.
    """
    refuse(UNFIT, microbatch_problems(engine.setup, [microbatch]))
    programs, count = engine.sync_loop(state).programs, engine.regions.count
    placed = (
        None if engine.regions.mesh.size == 1 else engine.regions.sharding(REGION, None, "fsdp")
    )

    def staged(x: Any) -> jax.ShapeDtypeStruct:
        x = np.asarray(x)
        shape = (count, engine.block, microbatch, *x.shape[2:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=placed)

    active = jax.ShapeDtypeStruct((count, engine.block), bool)
    counts = jax.ShapeDtypeStruct((count,), np.int32)
    whole = jax.ShapeDtypeStruct((), np.int32)
    needed = compiled_memory(
        programs.microbatch_program,
        jax.tree.map(_abstract, state.inner),
        jax.tree.map(_abstract, state.frozen),
        jax.tree.map(staged, batch),
        _abstract(engine.runner.region_keys),
        active if engine.method.schedule.uneven else None,
        counts,
        whole,
        whole,
    )
    beside = (state.anchor, state.received, state.outer, state.codec, state.landing)
    return needed["total"] + device_bytes(beside)


def device_bytes(tree: PyTree) -> int:
    """Bytes of a tree of arrays on one device; what is offloaded to the host does not count."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def _shard_bytes(x: jax.Array) -> int:
    if x.sharding.memory_kind == HOST:
        return 0
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
