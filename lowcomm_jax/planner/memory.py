"""Bytes per device of a plan: the state by share, and an estimate of activations.

What a program needs says its compiler (`aot`).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on a device.

    Attributes:
        state: {name: bytes}: the device has the share of it that it has of the parameters. That is
            exact for what has the shapes of parameters of one dtype, as moments and anchors have.
            A codec's factors may be cut otherwise.
        estimates: {name: bytes}: buffers in flight and activations.
    """

    state: dict[str, int]
    estimates: dict[str, int]

    @property
    def state_total(self) -> int:
        """Sum the state."""
        return sum(self.state.values())

    @property
    def estimate_total(self) -> int:
        """Sum the estimates."""
        return sum(self.estimates.values())

    @property
    def total(self) -> int:
        """Sum both: an estimate, too."""
        return self.state_total + self.estimate_total


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
        Bytes: an estimate, typically within tens of per cent.
    """
    stages, tensor = mesh.get("stage", 1), mesh.get("tensor", 1)
    depth = -(-layers // stages)
    element = tokens * width
    kept = depth * 2 * element + 34 * element // tensor if remat else depth * 34 * element // tensor
    logits = 6 * tokens * vocab // (tensor * stages)
    return int(kept + logits)
