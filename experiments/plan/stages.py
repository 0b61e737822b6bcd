"""Ask the compiler how much memory DiLoCoX in pipeline stages needs: inner step, send, landing.

Programs are lowered on shapes over regions x stages x fsdp x tensor devices; nothing is allocated.
The devices are usually virtual (`XLA_FLAGS=--xla_force_host_platform_device_count=16`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.progress import Work
from lowcomm_jax import Engine, make_mesh, methods
from lowcomm_jax.models import PRESETS, Pipeline, TransformerConfig, build
from lowcomm_jax.models.pipeline.pipeline import Schedule, pipeline_problems, schedule_problems
from lowcomm_jax.network.errors import whole
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.params.layout import make_layout
from lowcomm_jax.planner.memory import compiled_memory, memory_of
from lowcomm_jax.planner.plan import Workload
from lowcomm_jax.sync import round_programs
from lowcomm_jax.sync.initial_state import abstract_state, region_batch
from lowcomm_jax.sync.round_programs import RoundPrograms

STACKED = ("blocks",)
PERIOD = 125  # H of the published run; no program depends on it


def staged_violations(
    name: str | None,
    regions: int,
    mesh: Mapping[str, int],
    tokens: Any,
    step_tokens: Any,
    schedule: str = "gpipe",
) -> list[str]:
    """Why stages cannot be compiled here, one line with its fix each."""
    if name not in PRESETS:
        return ["compile=True needs a program: name a preset of lowcomm_jax.models as the model"]
    stages = mesh["stage"]
    need, have = regions * math.prod(mesh.values()), jax.device_count()
    found = pipeline_problems(config_of(name, True), stages, 1)
    found += [f"pipeline_schedule: {line}" for line in schedule_problems(schedule, False)]
    if need > have:
        found.append(
            f"compile=True: {regions} regions of {dict(mesh)} are {need} devices, here are {have}: "
            f"use a smaller mesh, or XLA_FLAGS=--xla_force_host_platform_device_count={need}"
        )
    found += [f"compile=True: {line}" for line in whole("microbatch_tokens", tokens)]
    numbers = isinstance(step_tokens, int | float)  # else refused already
    if not found and numbers and _microbatches(regions, mesh, tokens, step_tokens) < 1:
        found.append(
            f"compile=True: tokens_per_step={step_tokens:g} are less than a microbatch on every "
            "device: use more"
        )
    return found


def staged_bytes(
    name: str, work: Workload, rank: int, schedule: Schedule = "gpipe"
) -> dict[str, Any]:
    """Compile the programs of DiLoCoX and read the memory they need; nothing is run.

    Args:
      name: a preset of `lowcomm_jax.models`.
      work: gives the number of regions, the mesh inside one, tokens of an inner step of all regions
        and of one device's microbatch; activations are bf16.
      rank: of the low-rank int4 codec.

    Returns:
      `device`, `pipeline` (`Pipeline.report`), and bytes a device of every program in
      `planner.memory.compiled_memory`'s terms: `inner` (AdamW step), `send`, `move`.
    """
    regions, tokens = work.network.size, work.microbatch_tokens
    config = config_of(name, work.remat)
    length = min(tokens, config.max_seq_len)
    count = _microbatches(regions, work.mesh, tokens, work.tokens_per_step)
    pipe = Pipeline(build(config), make_mesh(regions, **work.mesh), count, schedule=schedule)
    sequences = count * work.mesh.get("fsdp", 1) * -(-tokens // length)
    params = jax.eval_shape(pipe.init, jax.random.key(0))
    codec = {"name": "low_rank_int4", "stacked": STACKED}
    method = methods.dilocox(PERIOD, codec=codec, rank=rank, adaptive=False)
    found = programs(pipe.loss_fn, method, regions, pipe.mesh, params, pipe.specs(params))
    batch = {"tokens": jax.ShapeDtypeStruct((sequences, length + 1), jnp.int32)}
    with Work("plan: programs compiled", 2) as work:
        work.at("inner step", 0)
        inner = inner_bytes(found, params, batch)
        work.at("send and landing", 1)
        outer = _outer_bytes(found, params)
    device = jax.devices()[0].device_kind
    return {"device": device, "pipeline": pipe.report(), "inner": inner, **outer}


def config_of(name: str, remat: bool) -> TransformerConfig:
    """A preset of models, as plans compile it."""
    changes = {"remat": "full" if remat else "none", "compute_dtype": "bfloat16"}
    return dataclasses.replace(PRESETS[name], layer_loop="scan", **changes)


def _microbatches(regions: int, mesh: Mapping[str, int], tokens: int, step_tokens: float) -> int:
    return int(step_tokens // (regions * mesh.get("fsdp", 1) * tokens))


def programs(
    loss_fn: Callable, method: methods.Method, regions: int, mesh: Mesh, params: Any, specs: Any
) -> RoundPrograms:
    """Programs of an engine of a model of ours, nothing of them compiled yet."""
    by_name = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(specs)}
    engine = Engine(
        loss_fn,
        optax.adamw(1e-4),
        method,
        regions,
        mesh=mesh,
        specs=lambda name, leaf: by_name[name],
        stacked=STACKED,
    )
    return round_programs.build(engine.config, make_layout(params, None))


def inner_bytes(found: RoundPrograms, params: Any, batch: Any) -> dict[str, int]:
    """Bytes a device of an inner step of a batch `[b, ...]` in every region."""
    state, count = abstract_state(found, params), found.config.regions.count
    ids, staged = jnp.arange(count, dtype=jnp.int32), region_batch(found, batch)
    args = (state.inner, state.frozen, staged, ids, None, np.int32(1))
    return compiled_memory(found.inner_program, *args)


def _outer_bytes(found: RoundPrograms, params: Any) -> dict[str, dict[str, int]]:
    """Send and landing of the one fragment that DiLoCoX has."""
    state, cut, count = abstract_state(found, params), found.fragments, found.config.regions.count
    anchor, rows = cut.leaves(state.anchor, 0), cut.rows(0)
    everyone, weight = np.ones(count, bool), np.ones(count, np.float32)
    theta = cut.leaves(state.inner.params, 0)
    send = found.payload_program.lower(
        theta, anchor, state.codec[0], rows, everyone, weight, with_snapshot=False
    )
    sent = send.compile()
    payload = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        send.out_info["payload"],
        sent.output_shardings["payload"],
    )
    move = found.outer_program.lower(anchor, state.outer[0], payload, weight, rows)
    return {"send": memory_of(sent), "move": memory_of(move.compile())}
