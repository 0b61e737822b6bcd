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

from lowcomm_jax.train.batch_sharding import FSDP, TENSOR

_CUT_OVER = {"width": FSDP, "heads": TENSOR, "hidden": TENSOR, "vocabulary": TENSOR}


def parameter_specs(params: Any, axes: Any, axis_sizes: Mapping[str, int]) -> Any:
    """Returns a PartitionSpec per leaf over the mesh axes `fsdp` and `tensor`.

    Args:
      params: the parameters, or their shapes; a leading layer axis stays unsplit.
      axes: names of each one's axes, as `Model.axes` gives them.
      axis_sizes: sizes of the mesh axes; one that is missing has size 1. An axis that does not
        divide the dimension it would split (a vocabulary of 257 over 2) is left out for that leaf.

    Raises:
      ValueError: leaves that are no parameters of this model.
    """

    def spec(leaf, names):
        if not any(names):
            return PartitionSpec()
        over = (_CUT_OVER[name] for name in names)
        dims = zip(over, leaf.shape[-len(names) :], strict=True)
        cut = (axis if size % axis_sizes.get(axis, 1) == 0 else None for axis, size in dims)
        return PartitionSpec(*(None,) * (leaf.ndim - len(names)), *cut)

    return jax.tree.map(spec, params, axes)
