"""The model of a plan: a size of the planner, a preset of `lowcomm_jax.models`, or sizes given.

Of a preset the exact parameter tree is taken (shapes and shardings, nothing is allocated), and the
compiler can be asked what its train step needs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from lowcomm_jax.network.errors import ViolationsError, raise_all
from lowcomm_jax.network.memory import compiled_memory, held_elements
from lowcomm_jax.network.ranges import whole
from lowcomm_jax.network.shapes import MODELS, Decoder, Shapes, from_tree

AXES = ("fsdp", "tensor")
STATE_BYTES = 12  # fp32 parameters and AdamW's two moments: what a train step takes and gives


@dataclasses.dataclass(frozen=True)
class PlanModel:
    """What is planned.

    Attributes:
      shapes: as the planner needs it.
      preset: name out of `lowcomm_jax.models.PRESETS`; None for other models.
    """

    shapes: Shapes
    preset: str | None = None


def read_model(spec: Any) -> PlanModel:
    """Look a model up, or build it from its sizes.

    Args:
      spec: a name out of `network.shapes.MODELS` or `models.PRESETS`, or the fields of a
        `network.shapes.Decoder`.

    Raises:
      ViolationsError: everything that is wrong with it.
    """
    if isinstance(spec, str):
        return PlanModel(MODELS[spec].shapes()) if spec in MODELS else _preset(spec)
    known = set(Decoder.__dataclass_fields__)
    needed = {"layers", "width", "mlp", "heads", "vocab"}
    if not isinstance(spec, Mapping) or not needed <= set(spec) <= known:
        given = sorted(spec, key=str) if isinstance(spec, Mapping) else repr(spec)
        fix = f"use a name, or fields: needed {sorted(needed)}, known {sorted(known)}"
        raise ViolationsError("model", [f"given {given}: {fix}"])
    decoder = Decoder(**spec)
    raise_all("model", decoder.violations())
    return PlanModel(decoder.shapes())


def _preset(name: str) -> PlanModel:
    import jax  # with Flax, slow to import: only models that need it pay

    from lowcomm_jax.models import PRESETS, build

    if name not in PRESETS:
        fix = f"use {', '.join((*MODELS, *PRESETS))}, or give layers, width, mlp, heads, vocab"
        raise ViolationsError("model", [f"{name!r} is unknown: {fix}"])
    config = dataclasses.replace(PRESETS[name], layer_loop="scan")
    model = build(config)
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    params = from_tree(abstract, model.specs(abstract), ["blocks"], ["final_norm", "head"])
    return PlanModel(Shapes(tuple(params), config.layers, config.width, config.vocab_size), name)


def compile_violations(model: PlanModel, mesh: Mapping[str, int], tokens: Any) -> list[str]:
    """Say why the compiler cannot be asked here, each with its fix."""
    import jax

    if model.preset is None:
        return ["compile=True needs a program: name a preset of lowcomm_jax.models as the model"]
    found, count = [], mesh.get("fsdp", 1) * mesh.get("tensor", 1)
    if mesh.get("stage", 1) > 1:
        found.append("compile=True compiles one stage: use mesh.stage=1")
    if count > jax.device_count():
        have = jax.device_count()
        found.append(f"compile=True: the mesh has {count} devices, here are {have}: use a smaller")
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
    """Let the compiler of the devices at hand say what one region's AdamW step needs.

    Args:
      name: a preset of `lowcomm_jax.models`.
      mesh: sizes of the axes fsdp and tensor.
      tokens: of one device's microbatch; activations are bf16.
      remat: recompute each block in the backward pass.

    Returns:
      `device`, and bytes a device as `network.memory.compiled_memory` gives them.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from lowcomm_jax.models import PRESETS, build

    shape = mesh.get("fsdp", 1), mesh.get("tensor", 1)
    devices = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), AXES)
    changes = {"remat": "full" if remat else "none", "compute_dtype": "bfloat16"}
    config = dataclasses.replace(PRESETS[name], layer_loop="scan", **changes)
    model, optimizer = build(config), optax.adamw(1e-4)

    def step(params, moments, batch):
        grads = jax.grad(lambda p: model.loss_fn(p, batch, jax.random.key(0))[0])(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    def placed(leaf, spec):
        sharding = NamedSharding(devices, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    abstract = jax.eval_shape(model.init, jax.random.key(0))
    specs = model.specs(abstract, dict(devices.shape))
    moments = jax.eval_shape(optimizer.init, abstract)
    moment_specs = optax.tree.map_params(
        optimizer,
        lambda _, spec: spec,
        moments,
        specs,
        transform_non_params=lambda _: PartitionSpec(),
    )
    length = min(tokens, config.max_seq_len)
    batch = jax.ShapeDtypeStruct((shape[0] * -(-tokens // length), length + 1), jnp.int32)
    found = compiled_memory(
        jax.jit(step, donate_argnums=(0, 1)),
        jax.tree.map(placed, abstract, specs),
        jax.tree.map(placed, moments, moment_specs),
        {"tokens": placed(batch, PartitionSpec("fsdp"))},
    )
    return {"device": jax.devices()[0].device_kind, **found}
