"""Converts parameters between one subtree per layer and leaves stacked over layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def stack_layers(
    params: dict[Any, Any], stack: Callable[[Sequence[Any]], Any] = jnp.stack
) -> dict[Any, Any]:
    """Turns `blocks/<i>/...` (unrolled) into `blocks/...` with a leading layer axis (scan).

    Args:
      params: unrolled parameters.
      stack: joins the leaves of all layers; `np.stack` keeps NumPy leaves on the host.
    """
    blocks = params["blocks"]
    layers = [blocks[i] for i in range(len(blocks))]
    return {**params, "blocks": jax.tree.map(lambda *leaves: stack(leaves), *layers)}


def unstack_layers(params: dict[Any, Any]) -> dict[Any, Any]:
    """Turns `blocks/...` with a leading layer axis (scan) into `blocks/<i>/...` (unrolled)."""
    blocks = params["blocks"]
    layers = jax.tree.leaves(blocks)[0].shape[0]
    layer = {i: jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(layers)}
    return {**params, "blocks": layer}
