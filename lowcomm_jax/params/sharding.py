"""Shardings inside a region: of parameters, optimizer state, and states of a method's rules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from lowcomm_jax.mesh.regions import Regions, axis_names
from lowcomm_jax.refused import Refused

NEAR_SCALAR = 64
"""Values of a state that may be whole on every device of a region: counters, random keys."""
# What jax.tree.map says.
_TREES_DIFFER = re.compile("pytree structure error|(type|key|arity) mismatch")
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


def optimizer_state(optimizer: optax.GradientTransformation, like: PyTree) -> PyTree:
    """Shapes of an optimizer's state for parameters of these shapes.

    Raises:
      Refused: labels or a mask of the optimizer lack leaves of the parameters.
    """
    try:
        return jax.eval_shape(optimizer.init, like)
    except ValueError as error:
        if not _TREES_DIFFER.search(str(error)):
            raise
        line = (
            "the inner optimizer's labels (optax.multi_transform) or mask have another tree than "
            "the parameters: they need an entry for every leaf, frozen ones, too; or give a "
            "function of the parameters"
        )
        raise Refused("this optimizer cannot work", [line]) from error


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

    state = optimizer_state(optimizer, like)
    return optax.tree_map_params(
        optimizer,
        place,
        state,
        like,
        specs,
        transform_non_params=lambda _: regions.sharding(lead),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def rule_shardings(
    name: str,
    rule: optax.GradientTransformation,
    like: dict[str, jax.ShapeDtypeStruct],
    specs: dict[str, P],
    regions: Regions,
    lead: str | None,
) -> PyTree:
    """Shardings of the state of an outer or landing rule: arrays of a leaf's shape lie as the leaf.

    Args:
      name: of the rule, for the error.
      like: shapes of a fragment's leaves without the leading axis; `specs` has the same names.
      lead: mesh axis of the leading axis of every array, or None (replicated).

    Raises:
      ValueError: an array of more than a few values belongs to no leaf (`leaf_of`), while leaves
        are cut: it would be whole on every device of a region. Lists all such arrays.
    """
    state, homeless = jax.eval_shape(rule.init, like), []
    entries = [entry for spec in specs.values() for entry in spec]
    cut = any(regions.mesh.shape[axis] > 1 for entry in entries for axis in axis_names(entry))

    def place(path, x):
        leaf = leaf_of(path, state, like)
        if leaf is None and cut and math.prod(x.shape) > NEAR_SCALAR:
            homeless.append(f"{jax.tree_util.keystr(path)} {list(x.shape)}")
        fits = leaf is not None and like[leaf].shape == x.shape
        return regions.sharding(lead, *specs[leaf]) if fits else regions.sharding(lead)

    placed = jax.tree_util.tree_map_with_path(place, state)
    if homeless:
        raise ValueError(
            f"{name}: its state {', '.join(homeless)} stands under no leaf's name, so every device "
            "of a region would hold all of it; keep an array for each leaf, in dicts with the keys "
            "of `init`'s argument (jax.tree.map makes them)"
        )
    return placed


def leaf_of(path: tuple, state: PyTree, like: PyTree) -> str | None:
    """The leaf that an array of a state belongs to; None = to none.

    By the leaf's name on its path, or by its place in a sequence of as many entries as leaves.
    """
    names = [key.key for key in path if isinstance(key, DictKey) and key.key in like]
    if names:
        return names[-1]
    node = state
    for key in path:
        if isinstance(key, SequenceKey):
            if len(node) == len(like):
                return sorted(like)[key.idx]
            node = node[key.idx]
        elif isinstance(key, DictKey):
            node = node[key.key]
        elif isinstance(key, GetAttrKey):
            node = getattr(node, key.name)
        else:
            return None
    return None
