"""The state of a run as shapes and places: what programs are lowered on when nothing is there."""

from __future__ import annotations

from typing import Any

import jax

from lowcomm_jax.initial import anchor_axis, codec_shardings, initial_state
from lowcomm_jax.programs import Programs, inner_shardings
from lowcomm_jax.regions import REGION
from lowcomm_jax.sharding import leaf_shardings, optimizer_shardings
from lowcomm_jax.state import TrainState

PyTree = Any


def abstract_state(programs: Programs, params: PyTree) -> TrainState:
    """`initial.initial_state` without arrays: leaves are `ShapeDtypeStruct`s with a sharding.

    The clock, counters and landing states have none; they are not a device's memory.

    Args:
      programs: of a method that exchanges progress, with or without a codec.
      params: shapes of the user's parameters.
    """
    recipe, layout = programs.recipe, programs.step.layout
    regions = recipe.regions
    state = jax.eval_shape(lambda p: initial_state(programs, p), params)
    inner = inner_shardings(recipe, layout, layout.train_shapes(), programs.specs)
    _, axis = anchor_axis(programs)
    return state.replace(
        inner=_placed(state.inner, inner),
        anchor=_placed(state.anchor, leaf_shardings(regions, axis, programs.specs)),
        outer=tuple(_placed(s, o) for s, o in zip(state.outer, outer_shardings(programs))),
        codec=tuple(_codec(programs, p, s) for p, s in enumerate(state.codec)),
    )


def _codec(programs: Programs, p: int, state_R: PyTree) -> PyTree:
    if programs.exchange.codec is None:
        return state_R
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state_R)
    return _placed(state_R, codec_shardings(programs, p, one))


def outer_shardings(programs: Programs) -> list[PyTree]:
    """Where each fragment's outer state lies."""
    cut, (_, axis) = programs.fragments, anchor_axis(programs)
    found = []
    for p in range(len(cut)):
        like = {k: jax.ShapeDtypeStruct(s.shape, "float32") for k, s in cut.like(p).items()}
        specs = {name: programs.specs[name] for name in like}
        rule = programs.recipe.method.outer
        found.append(optimizer_shardings(rule, like, specs, programs.recipe.regions, axis))
    return found


def region_batch(programs: Programs, batch: PyTree) -> PyTree:
    """One staged step of batch shapes `[b, ...]` of a region, `[R, 1, b, ...]`."""
    regions = programs.recipe.regions
    where = regions.sharding(REGION, None, "fsdp")

    def one(leaf):
        shape = (regions.count, 1, *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

    return jax.tree.map(one, batch)


def _placed(tree: PyTree, shardings: PyTree) -> PyTree:
    """`shardings` may be a prefix of `tree`."""
    whole = jax.tree.broadcast(shardings, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, whole
    )
