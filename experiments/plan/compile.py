"""Ask the compiler how much memory the programs of a plan need, on this machine's devices.

Programs are lowered on shapes over regions x stages x fsdp x tensor devices; nothing is allocated.
The devices are usually virtual (`XLA_FLAGS=--xla_force_host_platform_device_count=16`). `plan`
imports this module only where a config asks: JAX and Flax are slow to import.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.plan.model import PlanModel
from experiments.progress import Work
from lowcomm_jax import Engine, make_mesh, methods
from lowcomm_jax.aot.programs import compile_engine
from lowcomm_jax.models import Pipeline, TransformerConfig, build
from lowcomm_jax.models.pipeline.pipeline import Schedule, pipeline_problems, schedule_problems
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.planner.memory import held_elements, memory_of
from lowcomm_jax.planner.plan import Workload
from lowcomm_jax.refused import whole

PERIOD = 125  # H of DiLoCoX's published run; no program depends on it
STATE_BYTES = 12  # fp32 parameters and AdamW's two moments: what a train step takes and gives


def compile_violations(
    model: PlanModel,
    regions: int,
    mesh: Mapping[str, int],
    tokens: Any,
    step_tokens: Any,
    schedule: str = "gpipe",
) -> list[str]:
    """Why the compiler cannot be asked here, one line with its fix each.

    Args:
      model: of the plan.
      regions, mesh: how many, and sizes of the axes inside one; without stages one is compiled.
      tokens: of one device's microbatch.
      step_tokens: of an inner step of all regions.
      schedule: of the stages.
    """
    if model.decoder is None:
        return ["compile=True: leave it out, and use plan --target for a model of your own"]
    stages, found = mesh.get("stage", 1), []
    regions = regions if stages > 1 else 1
    need, have = regions * math.prod(mesh.values()), jax.device_count()
    if stages > 1:
        found += pipeline_problems(_as_compiled(model.decoder, True), stages, 1)
        found += [f"pipeline_schedule: {line}" for line in schedule_problems(schedule, False)]
    if need > have:
        found.append(
            f"compile=True: {regions} regions of {dict(mesh)} are {need} devices, here are {have}: "
            f"use a smaller mesh, or XLA_FLAGS=--xla_force_host_platform_device_count={need}"
        )
    found += [f"compile=True: {line}" for line in whole("microbatch_tokens", tokens)]
    cut = stages > 1 and not found and isinstance(step_tokens, int | float)  # else refused already
    if cut and _microbatches(regions, mesh, tokens, step_tokens) < 1:
        found.append(
            f"compile=True: tokens_per_step={step_tokens:g} are less than a microbatch on every "
            "device: use more"
        )
    state, room = STATE_BYTES * max(held_elements(model.shapes.params, mesh)), _device_bytes()
    if stages == 1 and state > room:
        found.append(
            f"compile=True: {state / 1e9:.3g} GB of state do not fit into the {room / 1e9:.3g} GB "
            "of a device here: use a smaller model, or more devices"
        )
    return found


def _device_bytes() -> int:
    stats = jax.devices()[0].memory_stats()  # None on CPU: the host's memory is the device's
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def compiled_bytes(
    decoder: TransformerConfig, work: Workload, rank: int, schedule: Schedule = "gpipe"
) -> dict[str, Any]:
    """Compile the programs of a period and read the memory they need; nothing is run.

    Args:
      decoder: the model of the plan.
      work: gives the number of regions, the mesh inside one, tokens of an inner step of all regions
        and of one device's microbatch; activations are bf16.
      rank: of DiLoCoX's low-rank int4 codec.
      schedule: of pipeline stages.

    Returns:
      - `device`;
      - `pipeline`: `Pipeline.report` of DiLoCoX in stages; None without stages, where one region
        makes steps of AdamW;
      - `programs`: name -> bytes a device as `planner.memory.memory_of` gives them; the first
        is the inner step.
    """
    tokens, config = work.microbatch_tokens, _as_compiled(decoder, work.remat)
    staged, model = work.mesh.get("stage", 1) > 1, build(config)
    regions, count, method = 1, 1, methods.local_sgd(PERIOD)
    if staged:
        regions = work.network.size
        count = _microbatches(regions, work.mesh, tokens, work.tokens_per_step)
        codec = {"name": "low_rank_int4", "stacked": model.stacked}
        method = methods.dilocox(PERIOD, codec=codec, rank=rank, adaptive=False)
    mesh = make_mesh(regions, **work.mesh)
    if staged:
        model = Pipeline(model, mesh, count, schedule=schedule)
    params = jax.eval_shape(model.init, jax.random.key(0))
    specs = model.specs(params, dict(mesh.shape))
    by_name = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(specs)}
    engine = Engine(
        model.loss_fn,
        optax.adamw(1e-4),
        method,
        regions,
        mesh=mesh,
        specs=lambda name, leaf: by_name[name],
        stacked=model.stacked,
    )
    length = min(tokens, config.max_seq_len)
    sequences = count * work.mesh.get("fsdp", 1) * -(-tokens // length)
    batch = {"tokens": jax.ShapeDtypeStruct((sequences, length + 1), jnp.int32)}
    with Work("plan: programs compiled") as shown:
        found = compile_engine(engine, params, batch, progress=shown.at).programs
    return {
        "device": jax.devices()[0].device_kind,
        "pipeline": model.report() if staged else None,
        "programs": {program.name: memory_of(program.compiled) for program in found},
    }


def _as_compiled(decoder: TransformerConfig, remat: bool) -> TransformerConfig:
    """A decoder as plans compile it."""
    changes = {"remat": "full" if remat else "none", "compute_dtype": "bfloat16"}
    return dataclasses.replace(decoder, layer_loop="scan", **changes)


def _microbatches(regions: int, mesh: Mapping[str, int], tokens: int, step_tokens: float) -> int:
    return int(step_tokens // (regions * mesh.get("fsdp", 1) * tokens))
