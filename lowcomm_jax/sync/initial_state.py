"""The state at step 0: every region and every anchor start from the same parameters.

`initial_state` builds it; `abstract_state` gives its shapes and shardings without arrays. A family
with a loop of its own (`round_programs.Family`) calls what both are made of.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange.mesh import without_lead
from lowcomm_jax.mesh.arrays import place
from lowcomm_jax.mesh.offload import stow
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.params import fragments as fragmentation
from lowcomm_jax.params.sharding import leaf_shardings, rule_shardings
from lowcomm_jax.rules import merge
from lowcomm_jax.state.train_state import Inner, SyncCounters, TrainState
from lowcomm_jax.sync.round_functions import rounded
from lowcomm_jax.sync.round_programs import RoundPrograms, inner_shardings

PyTree = Any
Optimizers = tuple[PyTree, tuple[PyTree, ...]]
"""States of the inner optimizer, and of each fragment's outer one; or their shardings."""


def initial_state(programs: RoundPrograms, params: PyTree) -> TrainState:
    """Build the training state from the user's parameters.

    Args:
      params: the user's tree, of the programs' layout; its arrays are copied.
    """
    family = programs.family
    return start(programs, params) if family is None else family.initial_state(programs, params)


def _optimizers(
    programs: RoundPrograms, params_R: dict[str, jax.Array], anchor: dict[str, jax.Array]
) -> Optimizers:
    """As they start: in every region the inner one, the outer rules at the anchor."""
    opt = _inner_shardings(programs).opt
    inner = jax.jit(jax.vmap(programs.step.init), out_shardings=opt)(params_R)
    return inner, _outer(programs, anchor)


def start(
    programs: RoundPrograms,
    params: PyTree,
    optimizers: Callable[..., Optimizers] = _optimizers,
) -> TrainState:
    """The state at step 0, without what a family adds.

    Args:
      optimizers: makes their states of (programs, the regions' parameters, the anchor).
    """
    layout, regions, k = programs.step.layout, programs.regions, len(programs.fragments)
    shared = regions.sharding()
    anchor = {}
    if programs.method.has_anchor:
        anchor = _anchor(programs, layout.select(params, "train"))
    inner = _inner(programs, params)
    opt, outer = optimizers(programs, inner.params, anchor)
    state = TrainState(
        inner=dataclasses.replace(inner, opt=opt),
        frozen=place(jax.tree.map(_copy, layout.select(params, "frozen")), shared),
        anchor=anchor,
        received=_received(programs, layout.select(params, "train")),
        outer=outer,
        codec=codec_states(programs),
        landing=tuple(
            _stack(programs, *one)
            for one in zip(_landing_states(programs), landing_shardings(programs))
        ),
        rate=place(np.zeros(k, np.float32), shared),
        in_flight={},
        counters=_counters(programs),
        layout=layout,
        merge=_merge_states(programs),
    )
    if not programs.setup.offload:
        return state
    return state.replace(
        anchor=stow(state.anchor),
        received=stow(state.received),
        outer=stow(state.outer),
        merge=stow(state.merge),
    )


def _copy(x: Any) -> Any:
    """Arrays of its own: `place` may take those of the user as they are."""
    return x.copy() if isinstance(x, np.ndarray | jax.Array) else x


def _counters(programs: RoundPrograms) -> SyncCounters:
    schedule = programs.method.schedule
    decided = schedule.start() if schedule.remembers else {}
    return SyncCounters.start(len(programs.fragments), programs.regions.count, decided)


def _broadcast(tree: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (count, *x.shape)), tree)


@functools.lru_cache(maxsize=256)
def _copies(count: int, dtype: Any, out: tuple[jax.sharding.Sharding, ...]):
    """Makes `count` copies of arrays; engines whose parameters are alike share the program."""

    def copies(leaves):
        return _broadcast(tuple(jnp.asarray(x, dtype) for x in leaves), count)

    return jax.jit(copies, out_shardings=out)


def _spread(tree: PyTree, count: int, shardings: PyTree, dtype: Any = None) -> PyTree:
    """The same values `count` times, leaves `[count, ...]`, as `dtype` (None = their own)."""
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    out = tuple(treedef.flatten_up_to(shardings))
    return treedef.unflatten(_copies(count, dtype, out)(tuple(leaves)))


def _stack(programs: RoundPrograms, tree: PyTree, out: PyTree = None) -> PyTree:
    """The same values in every region, leaves `[R, ...]`; `out` = None: whole on its devices."""
    regions = programs.regions
    if out is None:
        out = jax.tree.map(lambda _: regions.sharding(REGION), tree)
    return _spread(tree, regions.count, out)


def anchor_axis(programs: RoundPrograms) -> tuple[int, str | None]:
    """Length A of the anchors' leading axis and the mesh axis it lies on."""
    if programs.method.anchors == "per_region":
        return programs.regions.count, REGION
    return 1, None


def _anchor(programs: RoundPrograms, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    count, axis = anchor_axis(programs)
    out = leaf_shardings(programs.regions, axis, programs.specs)
    return _spread(params, count, out, jnp.float32)


def _received(programs: RoundPrograms, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    if programs.method.base == "anchor":
        return {}
    out = leaf_shardings(programs.regions, REGION, programs.specs)
    return _spread(params, programs.regions.count, out, jnp.float32)


def _inner(programs: RoundPrograms, params: PyTree) -> Inner:
    """Without the optimizer's state."""
    layout, regions = programs.step.layout, programs.regions
    count, region = regions.count, regions.sharding(REGION)
    train = layout.select(params, "train")
    params_R = _spread(train, count, leaf_shardings(regions, REGION, programs.specs))
    kept = rounded(programs.method, params_R)
    nothing = {k: np.zeros(params_R[k].shape[1:], np.float32) for k in kept}
    lies = leaf_shardings(regions, REGION, {k: programs.specs[k] for k in kept})
    return Inner(
        params=params_R,
        buffers=_stack(programs, layout.select(params, "local", "average")),
        opt=(),
        step=place(np.zeros(count, np.int32), region),
        tokens=place(np.zeros((count, len(programs.fragments)), np.float32), region),
        rounding=_spread(nothing, count, lies),
    )


def _outer(programs: RoundPrograms, anchor: dict[str, jax.Array]) -> tuple[PyTree, ...]:
    """One outer state per fragment, initialised on the fragment's own tree."""
    if not anchor:
        return ((),) * len(programs.fragments)
    cut, shardings = programs.fragments, outer_shardings(programs)

    def init(leaves, rows, rule):
        return jax.vmap(rule.init)(fragmentation.take(leaves, rows))

    return tuple(
        jax.jit(init, out_shardings=out, static_argnames="rule")(
            cut.leaves(anchor, p), cut.rows(p), rule=programs.method.outer_of(p)
        )
        for p, out in enumerate(shardings)
    )


def _merge_states(programs: RoundPrograms) -> tuple[PyTree, ...]:
    rule, cut, setup = programs.method.merge, programs.fragments, programs.setup
    if rule is None:
        return ()

    def start() -> tuple[PyTree, ...]:
        given = setup.regions, setup.stacked
        return tuple(merge.initial_states(rule, cut.like(p), *given) for p in range(len(cut)))

    remembers = bool(jax.tree.leaves(rule.init(setup.regions)))
    return jax.jit(start, out_shardings=programs.regions.sharding())() if remembers else start()


def codec_states(programs: RoundPrograms) -> tuple[PyTree, ...]:
    """Codec state of each fragment, leaves `[R, ...]`; residuals lie as leaves are coded."""
    states = tuple(_codec_state(programs, p) for p in range(len(programs.fragments)))
    return stow(states) if programs.setup.offload else states


def _codec_state(programs: RoundPrograms, p: int) -> PyTree:
    exchange, count = programs.exchange, programs.regions.count
    if exchange.codec is None:
        return ()
    like = programs.fragments.like(p)
    state = exchange.whole(like).init(like)
    out = codec_shardings(programs, p, state)
    return _spread(state, count, out)


def codec_shardings(programs: RoundPrograms, p: int, state: PyTree) -> PyTree:
    """Shardings of fragment p's codec states `[R, ...]`; `state` is that of one region."""
    regions, like = programs.regions, programs.fragments.like(p)
    specs = programs.exchange.state_specs(state, like)
    return jax.tree.map(lambda _, spec: regions.sharding(REGION, *spec), state, specs)


def _landing_states(programs: RoundPrograms) -> list[PyTree]:
    method, cut = programs.method, programs.fragments

    def init(p: int) -> PyTree:
        rule = method.landing_of(p)
        if rule is None:
            return ()
        return rule.init({k: jnp.zeros(s.shape) for k, s in cut.like(p).items()})

    return [init(p) for p in range(len(cut))]


# -- shapes and places: what programs are lowered on when nothing is there -----------------------


def abstract_state(programs: RoundPrograms, params: PyTree) -> TrainState:
    """`initial_state` without arrays: leaves are `ShapeDtypeStruct`s with a sharding.

    Counters hold their values, since the host reads them.

    Args:
      params: shapes of the user's parameters.
    """
    state, family = jax.eval_shape(lambda p: initial_state(programs, p), params), programs.family
    return placed_state(programs, state) if family is None else family.placed_state(programs, state)


def placed_state(
    programs: RoundPrograms, state: TrainState, optimizers: Optimizers | None = None
) -> TrainState:
    """The shapes of a state with their shardings, without what a family adds.

    Args:
      optimizers: their shardings; None = as `start` has them.
    """
    regions, inner = programs.regions, _inner_shardings(programs)
    opt, outer_out = optimizers or (inner.opt, outer_shardings(programs))
    _, axis = anchor_axis(programs)
    received = leaf_shardings(regions, REGION, programs.specs) if state.received else {}
    anchor = leaf_shardings(regions, axis, programs.specs) if state.anchor else {}
    return state.replace(
        inner=placed(state.inner, dataclasses.replace(inner, opt=opt)),
        frozen=placed(state.frozen, regions.sharding()),
        counters=_counters(programs),
        received=placed(state.received, received),
        rate=placed(state.rate, regions.sharding()),
        merge=placed(state.merge, regions.sharding()),
        landing=tuple(placed(*one) for one in zip(state.landing, landing_shardings(programs))),
        anchor=placed(state.anchor, anchor),
        outer=tuple(placed(*one) for one in zip(state.outer, outer_out)),
        codec=tuple(_codec(programs, p, s) for p, s in enumerate(state.codec)),
    )


def _inner_shardings(programs: RoundPrograms) -> Inner:
    layout = programs.step.layout
    return inner_shardings(programs.setup, layout, layout.train_shapes(), programs.specs)


def _codec(programs: RoundPrograms, p: int, state_R: PyTree) -> PyTree:
    if programs.exchange.codec is None:
        return state_R
    return placed(state_R, codec_shardings(programs, p, without_lead(state_R)))


def outer_shardings(programs: RoundPrograms) -> list[PyTree]:
    """Shardings of each fragment's outer state."""
    method, cut, (_, axis) = programs.method, programs.fragments, anchor_axis(programs)
    return [
        _rule_shardings(programs, "outer", method.outer_of(p), p, axis) for p in range(len(cut))
    ]


def landing_shardings(programs: RoundPrograms) -> list[PyTree]:
    """Shardings of each fragment's landing state `[R, ...]`."""
    rules = [programs.method.landing_of(p) for p in range(len(programs.fragments))]
    return [_rule_shardings(programs, "landing", rule, p, REGION) for p, rule in enumerate(rules)]


def _rule_shardings(programs: RoundPrograms, name: str, rule, p: int, lead: str | None) -> PyTree:
    """`rule_shardings` on the leaves of fragment p; () without a rule."""
    if rule is None:
        return ()
    shapes = programs.fragments.like(p)
    like = {k: jax.ShapeDtypeStruct(s.shape, "float32") for k, s in shapes.items()}
    specs = {leaf: programs.specs[leaf] for leaf in like}
    return rule_shardings(name, rule, like, specs, programs.regions, lead)


def region_batch(programs: RoundPrograms, batch: PyTree) -> PyTree:
    """One staged step of batch shapes `[b, ...]` of a region, `[R, 1, b, ...]`."""
    regions = programs.regions
    where = regions.sharding(REGION, None, "fsdp")

    def one(leaf):
        shape = (regions.count, 1, *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

    return jax.tree.map(one, batch)


def placed(tree: PyTree, shardings: PyTree) -> PyTree:
    """`shardings` may be a prefix of `tree`."""
    whole = jax.tree.broadcast(shardings, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, whole
    )
