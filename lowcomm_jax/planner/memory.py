"""Bytes per device: exact state, an activation estimate, or the compiler's own analysis.

`plan_memory` adds up the state from shapes and shardings (`held_elements`) and estimates.
`activation_estimate` estimates activations. `memory_of` asks the compiler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowcomm_jax.planner.shapes import Param


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest device.

    Attributes:
        state: {name: bytes}: exact for the given shapes, shardings and dtypes.
        estimates: {name: bytes}: buffers in flight and activations; not exact.
        stage: the pipeline stage that is fullest.
        stage_bytes: state bytes of a device of each stage.
    """

    state: dict[str, int]
    estimates: dict[str, int]
    stage: int
    stage_bytes: tuple[int, ...]

    @property
    def state_total(self) -> int:
        """Sum the exact part."""
        return sum(self.state.values())

    @property
    def estimate_total(self) -> int:
        """Sum the estimates."""
        return sum(self.estimates.values())


def held_elements(params: Sequence[Param], mesh: Mapping[str, int]) -> list[int]:
    """Count the parameter elements one device of each pipeline stage holds, padding included.

    As `models.pipeline.layout` does it, stage s of S holds layers [s C, (s + 1) C) of L, with
    C = ceil(L / S). Layers like the last one fill up the last stages. Every stage holds its part of
    what is outside the layers, see `Param.spec`. This is assumed of every other model, too.

    Args:
        params: abstract parameters; layers are numbered from 0 without gaps.
        mesh: sizes of the axes inside a region: "stage" cuts the model by depth, others shard
            dimensions.
    """
    stages = mesh.get("stage", 1)
    outside = sum(p.shard_size(mesh) for p in params if p.layer is None)
    layers = 1 + max((p.layer for p in params if p.layer is not None), default=-1)
    size_L = [0] * layers
    for param in params:
        if param.layer is not None:
            size_L[param.layer] += param.shard_size(mesh)
    each = -(-layers // stages)
    size_L += size_L[-1:] * (each * stages - layers)
    return [outside + sum(size_L[s * each : (s + 1) * each]) for s in range(stages)]


def plan_memory(
    held: Sequence[int],
    bytes_per_param: Mapping[str, float],
    estimates: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """Add up the state of one device.

    Args:
        held: from `held_elements`.
        bytes_per_param: {name: bytes per parameter element}, held in the parameters' own sharding.
        estimates: {name: bytes per device} of anything else.
    """
    fullest = max(range(len(held)), key=lambda k: held[k])
    state = {what: round(held[fullest] * each) for what, each in bytes_per_param.items() if each}
    per_element = sum(bytes_per_param.values())
    stage_bytes = tuple(round(h * per_element) for h in held)
    return MemoryPlan(state, dict(estimates or {}), fullest, stage_bytes)


def activation_estimate(
    layers: int, width: int, vocab: int, tokens: int, mesh: Mapping[str, int], remat: bool = True
) -> int:
    """Estimate activation bytes on one device for a bf16 decoder with fused attention.

    Args:
        layers, width, vocab: of the model.
        tokens: tokens of one microbatch on one device group.
        mesh: "stage" divides the layers and the vocabulary, "tensor" the width and the vocabulary.
        remat: keep only each layer's input (2 bytes per element) and recompute one layer at a time.
            Otherwise 34 bytes per element and layer (arXiv 2205.05198, attention scores not kept).

    Returns:
        Bytes: an estimate, typically within tens of per cent; the compiler's figure is
            `memory_of`.
    """
    stages, tensor = mesh.get("stage", 1), mesh.get("tensor", 1)
    depth = -(-layers // stages)
    element = tokens * width
    kept = depth * 2 * element + 34 * element // tensor if remat else depth * 34 * element // tensor
    logits = 6 * tokens * vocab // (tensor * stages)
    return int(kept + logits)


def memory_of(compiled: Any) -> dict[str, int]:
    """The bytes of a compiled program, as the compiler of its device says them.

    Returns:
        {"arguments", "outputs", "temporaries", "aliased", "total"} in bytes per device.
    """
    analysis = compiled.memory_analysis()
    parts = {
        "arguments": int(analysis.argument_size_in_bytes),
        "outputs": int(analysis.output_size_in_bytes),
        "temporaries": int(analysis.temp_size_in_bytes),
        "aliased": int(analysis.alias_size_in_bytes),
    }
    total = parts["arguments"] + parts["outputs"] + parts["temporaries"] - parts["aliased"]
    return {**parts, "total": total}
