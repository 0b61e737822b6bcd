"""The state at step 0: every region and every anchor start from the same parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax import fragments as fragmentation
from lowcomm_jax.offload import stow
from lowcomm_jax.processes import place
from lowcomm_jax.programs import Programs
from lowcomm_jax.regions import REGION
from lowcomm_jax.sharding import leaf_shardings, optimizer_shardings
from lowcomm_jax.state import Clock, Inner, TrainState

PyTree = Any


def initial_state(programs: Programs, params: PyTree) -> TrainState:
    """Build the training state from the user's parameters (any pytree of the known layout)."""
    recipe, layout = programs.recipe, programs.step.layout
    regions, k = recipe.regions, len(programs.fragments)
    shared = regions.sharding()
    count = regions.count
    anchor = _anchor(programs, layout.select(params, "train"))
    state = TrainState(
        inner=_inner(programs, params),
        frozen=place(layout.select(params, "frozen"), shared),
        anchor=anchor,
        received=_received(programs, layout.select(params, "train")),
        outer=_outer(programs, anchor),
        codec=codec_states(programs),
        bases=tuple(_bases(programs, p) for p in range(k)),
        landing=tuple(_stack(programs, s) for s in _landing_states(programs)),
        rate=place(np.zeros(k, np.float32), shared),
        in_flight={},
        clock=Clock.start(k, count, programs.method.schedule.start()),
        layout=layout,
    )
    if not recipe.offload:
        return state
    return state.replace(
        anchor=stow(state.anchor),
        received=stow(state.received),
        outer=stow(state.outer),
    )


def _broadcast(tree: PyTree, count: int, dtype: Any = None) -> PyTree:
    def one(x):
        x = jnp.asarray(x, dtype)
        return jnp.broadcast_to(x[None], (count, *x.shape))

    return jax.tree.map(one, tree)


def _stack(programs: Programs, tree: PyTree) -> PyTree:
    """The same values in every region, leaves `[R, ...]`."""
    regions = programs.recipe.regions
    place = jax.jit(lambda t: _broadcast(t, regions.count), out_shardings=regions.sharding(REGION))
    return place(tree)


def anchor_axis(programs: Programs) -> tuple[int, str | None]:
    """Length A of the anchors' leading axis and the mesh axis it lies on."""
    recipe = programs.recipe
    if recipe.method.anchors == "per_region":
        return recipe.regions.count, REGION
    return 1, None


def _anchor(programs: Programs, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    count, axis = anchor_axis(programs)
    out = leaf_shardings(programs.recipe.regions, axis, programs.specs)
    return jax.jit(lambda t: _broadcast(t, count, jnp.float32), out_shardings=out)(params)


def _received(programs: Programs, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    recipe = programs.recipe
    if recipe.method.base == "anchor":
        return {}
    out = leaf_shardings(recipe.regions, REGION, programs.specs)
    spread = jax.jit(lambda t: _broadcast(t, recipe.regions.count, jnp.float32), out_shardings=out)
    return spread(params)


def _inner(programs: Programs, params: PyTree) -> Inner:
    recipe, layout = programs.recipe, programs.step.layout
    regions = recipe.regions
    count, region = regions.count, regions.sharding(REGION)
    train = layout.select(params, "train")
    spread = jax.jit(
        lambda t: _broadcast(t, count),
        out_shardings=leaf_shardings(regions, REGION, programs.specs),
    )
    params_R = spread(train)
    opt: PyTree = ()
    if recipe.method.signal == "progress":
        like, specs = layout.tree(train), layout.tree(programs.specs)
        out = optimizer_shardings(recipe.inner, like, specs, regions, REGION)
        opt = jax.jit(jax.vmap(programs.step.init), out_shardings=out)(params_R)
    return Inner(
        params=params_R,
        buffers=_stack(programs, layout.select(params, "local", "average")),
        opt=opt,
        step=place(np.zeros(count, np.int32), region),
        tokens=place(np.zeros((count, len(programs.fragments)), np.float32), region),
    )


def _outer(programs: Programs, anchor: dict[str, jax.Array]) -> tuple[PyTree, ...]:
    """One outer state per fragment, initialised on the fragment's own tree."""
    recipe, layout = programs.recipe, programs.step.layout
    regions, (_, axis) = recipe.regions, anchor_axis(programs)
    if recipe.method.signal == "gradient":
        like = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in anchor.items()}
        out = optimizer_shardings(
            recipe.inner, layout.tree(like), layout.tree(programs.specs), regions, axis
        )
        return (jax.jit(jax.vmap(programs.step.init), out_shardings=out)(anchor),)
    rule, cut = recipe.method.outer, programs.fragments

    def init(leaves, rows):
        return jax.vmap(rule.init)(fragmentation.take(leaves, rows))

    states = []
    for p in range(len(cut)):
        specs = {name: programs.specs[name] for name in cut.like(p)}
        like = {k: jax.ShapeDtypeStruct(s.shape, jnp.float32) for k, s in cut.like(p).items()}
        out = optimizer_shardings(rule, like, specs, regions, axis)
        states.append(jax.jit(init, out_shardings=out)(cut.leaves(anchor, p), cut.rows(p)))
    return tuple(states)


def codec_states(programs: Programs) -> tuple[PyTree, ...]:
    """Of each fragment, leaves `[R, ...]`; residuals are sharded as what they are added to."""
    states = tuple(_codec_state(programs, p) for p in range(len(programs.fragments)))
    return stow(states) if programs.recipe.offload else states


def _codec_state(programs: Programs, p: int) -> PyTree:
    codec, count = programs.exchange.codec, programs.recipe.regions.count
    if codec is None:
        return ()
    state = codec.init(programs.fragments.like(p))
    out = codec_shardings(programs, p, state)
    return jax.jit(lambda t: _broadcast(t, count), out_shardings=out)(state)


def _bases(programs: Programs, p: int) -> tuple[PyTree, ...]:
    """Of fragment p; a method that sends before it lands has two payloads in flight for a moment.

    They differ, so that the first rounds do not look into the same directions.
    """
    exchange, like = programs.exchange, programs.fragments.like(p)
    count = 2 if programs.method.schedule.land_after_send else 1
    if exchange.codec is None or not exchange.codec.shares_basis:
        return ((),) * count

    def start(turn):
        return exchange.rows.place_bases(exchange.codec.bases(like, turn))

    return tuple(jax.jit(start, static_argnums=0)(turn) for turn in range(count))


def codec_shardings(programs: Programs, p: int, state: PyTree) -> PyTree:
    """Where fragment p's codec states `[R, ...]` lie; `state` is that of one region."""
    regions, like = programs.recipe.regions, programs.fragments.like(p)
    inside = {name: programs.specs[name] for name in like}
    specs = programs.exchange.rows.state_specs(state, like, inside)
    return jax.tree.map(lambda _, spec: regions.sharding(REGION, *spec), state, specs)


def _landing_states(programs: Programs) -> list[PyTree]:
    landing, cut = programs.recipe.method.landing, programs.fragments
    if landing is None:
        return [()] * len(cut)
    zeros = [{k: jnp.zeros(s.shape) for k, s in cut.like(p).items()} for p in range(len(cut))]
    return [landing.init(z) for z in zeros]
