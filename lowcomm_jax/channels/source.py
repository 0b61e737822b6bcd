"""The leaves that a channel averages, found in the regions' private state and put back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.refused import Refused
from lowcomm_jax.state.train_state import Inner

PyTree = Any
PARAMS = "params"
Leaves = tuple[dict[str, jax.Array], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Source:
    """Leaves of `params`, or of one field of the inner optimizer's state.

    Attributes:
      name: `params`, or the field: Adam's `mu` and `nu`, the `trace` of momentum.
      leaves: (name of the leaf in the source, name of the parameter it belongs to), in order.
    """

    name: str
    leaves: tuple[tuple[str, str], ...]

    def take(self, inner: Inner) -> Leaves:
        """The leaves by name, `[R, ...]`, and what rounding took from them (`Inner.rounding`)."""
        if self.name == PARAMS:
            return {name: inner.params[name] for name, _ in self.leaves}, inner.rounding
        named = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(inner.opt)}
        return {name: named[name] for name, _ in self.leaves}, {}

    def put(self, inner: Inner, leaves: Leaves) -> Inner:
        """The same state with these leaves replaced."""
        values, rounding = leaves
        if self.name == PARAMS:
            return dataclasses.replace(inner, params={**inner.params, **values}, rounding=rounding)

        def one(path, leaf):
            return values.get(path_name(path), leaf)

        opt = jax.tree_util.tree_map_with_path(one, inner.opt)
        return dataclasses.replace(inner, opt=opt)


def find_source(name: str, opt: PyTree, shapes: dict[str, jax.ShapeDtypeStruct]) -> Source:
    """Find a source's leaves.

    Args:
      opt: inner optimizer state of one region, arrays or shapes.
      shapes: trained leaves of one region, by name.

    Raises:
      Refused: the optimizer has no such field with leaves of the parameters' shapes.
    """
    if name == PARAMS:
        return Source(name, tuple((leaf, leaf) for leaf in shapes))
    found, fields = [], set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt):
        for i, key in enumerate(path):
            parameter, like = path_name(path[i + 1 :]), None
            if not isinstance(key, jax.tree_util.SequenceKey):
                like = shapes.get(parameter)
            if like is not None and like.shape == leaf.shape:
                field = path_name((key,))
                fields.add(field)
                if field == name:
                    found.append((path_name(path), parameter))
                break  # keys behind the field are the parameter's, whatever they are called
    if not found:
        has = f"it has {', '.join(sorted(fields))}" if fields else "it has none of that kind"
        line = (
            f"channel source={name!r}: the inner optimizer's state has no such field with an array "
            f"for each parameter ({has}): use another optimizer, as AdamW, or another source"
        )
        raise Refused("this channel cannot work", [line])
    return Source(name, tuple(found))
