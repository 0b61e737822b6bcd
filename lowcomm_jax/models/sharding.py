"""How each parameter is laid out over the devices of one region.

Column-parallel matrices (into heads, into the MLP, into the vocabulary) split their outputs over
`tensor` and their inputs over `fsdp`. Row-parallel ones (back to the residual stream) do the
reverse. A block then needs one reduction over `tensor` after attention and one after the MLP
(arXiv 1909.08053). Norm scales are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

_COLUMN = ("fsdp", "tensor")
_ROW = ("tensor", "fsdp")
_LAYOUT = {
    ("query", "kernel"): _COLUMN,
    ("key", "kernel"): _COLUMN,
    ("value", "kernel"): _COLUMN,
    ("output", "kernel"): _ROW,
    ("gate", "kernel"): _COLUMN,
    ("up", "kernel"): _COLUMN,
    ("down", "kernel"): _ROW,
    ("head", "kernel"): _COLUMN,
    ("embedding", "table"): _ROW,
}


def parameter_specs(params: Any, axis_sizes: Mapping[str, int] | None = None) -> Any:
    """Returns a PartitionSpec per leaf over the mesh axes `fsdp` and `tensor`.

    Args:
      params: the parameters, or their shapes; a leading layer axis stays unsplit.
      axis_sizes: sizes of the mesh axes. When given, an axis that does not divide the dimension
        it would split (a vocabulary of 257 over 2) is left out for that leaf.

    Raises:
      ValueError: leaves that are no parameters of this model, all of them listed.
    """
    unknown = []

    def spec(path, leaf):
        names = tuple(str(entry.key) for entry in path)
        if names[-1] == "scale":
            return PartitionSpec()
        if names[-2:] not in _LAYOUT:
            unknown.append("/".join(names))
            return PartitionSpec()
        axes = (None,) * (leaf.ndim - 2) + _LAYOUT[names[-2:]]
        if axis_sizes is None:
            return PartitionSpec(*axes)
        dims = zip(axes, leaf.shape, strict=True)
        return PartitionSpec(
            *(axis if axis and size % axis_sizes.get(axis, 1) == 0 else None for axis, size in dims)
        )

    specs = jax.tree.map_with_path(spec, params)
    if unknown:
        raise ValueError(
            "no layout for these leaves: " + ", ".join(unknown) + "; pass the parameters of "
            "Model.init, or write the PartitionSpecs of another model by hand"
        )
    return specs
