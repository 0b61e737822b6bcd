"""Ask the compiler how much memory a planned inner step needs, on this machine's devices.

`plan` imports this module only where a config asks: JAX and Flax are slow to import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from experiments.plan.model import PlanModel
from experiments.plan.stages import PERIOD, config_of, inner_bytes, programs
from lowcomm_jax import make_mesh, methods
from lowcomm_jax.models import PRESETS, build
from lowcomm_jax.network.errors import whole
from lowcomm_jax.planner.memory import held_elements

STATE_BYTES = 12  # fp32 parameters and AdamW's two moments: what a train step takes and gives


def compile_violations(model: PlanModel, mesh: Mapping[str, int], tokens: Any) -> list[str]:
    """Why the compiler cannot be asked here, one line with its fix each."""
    if model.name not in PRESETS:
        return ["compile=True needs a program: name a preset of lowcomm_jax.models as the model"]
    found, count = [], mesh.get("fsdp", 1) * mesh.get("tensor", 1)
    if count > jax.device_count():
        have = jax.device_count()
        found.append(
            f"compile=True: the mesh has {count} devices, here are {have}: use a smaller mesh"
        )
    found += [f"compile=True: {line}" for line in whole("microbatch_tokens", tokens)]
    state = STATE_BYTES * max(held_elements(model.shapes.params, mesh))
    room = _device_bytes(jax.devices()[0])
    if state > room:
        found.append(
            f"compile=True: {state / 1e9:.3g} GB of state do not fit into the {room / 1e9:.3g} GB "
            "of a device here: use a smaller model, or more devices"
        )
    return found


def _device_bytes(device: Any) -> int:
    stats = device.memory_stats()  # None on CPU: there the host's memory is the device's
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def compiled_bytes(
    name: str, mesh: Mapping[str, int], tokens: int, remat: bool
) -> dict[str, int | str]:
    """Compile one region's AdamW step and read the memory it needs; nothing is run.

    Args:
      name: a preset of `lowcomm_jax.models`.
      mesh: sizes of the axes fsdp and tensor.
      tokens: of one device's microbatch; activations are bf16.
      remat: recompute each block in the backward pass.

    Returns:
      `device`, and bytes a device as `planner.memory.compiled_memory` gives them.
    """
    model = build(config_of(name, remat))
    made = make_mesh(1, fsdp=mesh.get("fsdp", 1), tensor=mesh.get("tensor", 1))
    params = jax.eval_shape(model.init, jax.random.key(0))
    specs = model.specs(params, dict(made.shape))
    found = programs(model.loss_fn, methods.local_sgd(PERIOD), 1, made, params, specs)
    length = min(tokens, model.config.max_seq_len)
    shape = mesh.get("fsdp", 1) * -(-tokens // length), length + 1
    batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}
    return {"device": jax.devices()[0].device_kind, **inner_bytes(found, params, batch)}
