"""Shardings of parameters and optimizer state inside a region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from lowcomm_jax.mesh.regions import Regions

PyTree = Any
SpecFn = Callable[[str, jax.ShapeDtypeStruct], P]


def fsdp_specs(devices: int) -> SpecFn:
    """Default layout: cut the longest axis that divides over the `fsdp` devices of a region."""

    def spec(name: str, leaf: jax.ShapeDtypeStruct) -> P:
        del name
        longest = longest_axis(leaf.shape, devices)
        return P() if longest < 0 else P(*(None,) * longest, "fsdp")

    return spec


def longest_axis(shape: Sequence[int], devices: int) -> int:
    """The longest dimension that divides over `devices`; -1 = there is none, or one device."""
    fitting = [i for i, n in enumerate(shape) if n and n % devices == 0]
    return -1 if devices == 1 or not fitting else max(fitting, key=lambda i: shape[i])


def leaf_shardings(regions: Regions, lead: str | None, specs: dict[str, P]) -> dict[str, Any]:
    """Shardings of named leaves behind a leading region or anchor axis."""
    return {name: regions.sharding(lead, *spec) for name, spec in specs.items()}


def optimizer_shardings(
    optimizer: optax.GradientTransformation,
    like: PyTree,
    specs: PyTree,
    regions: Regions,
    lead: str | None,
) -> PyTree:
    """Shardings of an optimizer's state: those of its parameters; counters are replicated.

    Args:
      like: shapes of the parameters without the leading axis; `specs` has the same structure.
      lead: mesh axis of the leading axis of every leaf, or None (replicated).
    """

    def place(leaf, parameter, spec):
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        # Factored moments and the like have another shape than their parameter.
        fits = leaf.shape == parameter.shape
        return regions.sharding(lead, *spec) if fits else regions.sharding(lead)

    return optax.tree_map_params(
        optimizer,
        place,
        jax.eval_shape(optimizer.init, like),
        like,
        specs,
        transform_non_params=lambda _: regions.sharding(lead),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
