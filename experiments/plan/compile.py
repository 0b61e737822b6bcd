"""Ask the compiler how much memory a planned inner step needs, on this machine's devices.

`plan` imports this module only where a config asks: JAX and Flax are slow to import.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.plan.model import PlanModel
from lowcomm_jax.models import PRESETS, Model, build
from lowcomm_jax.network.errors import whole
from lowcomm_jax.planner.memory import compiled_memory, held_elements

AXES = ("fsdp", "tensor")
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
    shape = mesh.get("fsdp", 1), mesh.get("tensor", 1)
    devices = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), AXES)
    changes = {"remat": "full" if remat else "none", "compute_dtype": "bfloat16"}
    model = build(dataclasses.replace(PRESETS[name], layer_loop="scan", **changes))
    optimizer = optax.adamw(1e-4)
    length = min(tokens, model.config.max_seq_len)
    batch = shape[0] * -(-tokens // length), length + 1
    sharding = NamedSharding(devices, PartitionSpec("fsdp"))
    found = compiled_memory(
        jax.jit(_train_step(model, optimizer), donate_argnums=(0, 1)),
        *_abstract_state(model, optimizer, devices),
        {"tokens": jax.ShapeDtypeStruct(batch, jnp.int32, sharding=sharding)},
    )
    return {"device": jax.devices()[0].device_kind, **found}


def _train_step(model: Model, optimizer: optax.GradientTransformation):
    def step(params, moments, batch):
        grads = jax.grad(lambda p: model.loss_fn(p, batch, jax.random.key(0))[0])(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    return step


def _abstract_state(model: Model, optimizer: optax.GradientTransformation, devices: Mesh):
    """Shapes of parameters and moments, each with its place on the devices."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    moments = jax.eval_shape(optimizer.init, params)
    specs = model.specs(params, dict(devices.shape))
    moment_specs = optax.tree.map_params(
        optimizer,
        lambda _, spec: spec,
        moments,
        specs,
        transform_non_params=lambda _: PartitionSpec(),
    )

    def placed(leaf, spec):
        sharding = NamedSharding(devices, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, params, specs), jax.tree.map(placed, moments, moment_specs)
