"""The state at step 0: every region and every anchor start from the same parameters.

`initial_state` builds it; `abstract_state` gives its shapes and shardings without arrays. Both go
one way: they differ in how an array is made (`Making`). A family with a loop of its own
(`round_programs.Family`) adds to it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowcomm_jax.mesh.arrays import place
from lowcomm_jax.mesh.offload import HOST, stow
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.params import fragments as fragmentation
from lowcomm_jax.params.sharding import leaf_shardings, rule_shardings
from lowcomm_jax.rules import merge
from lowcomm_jax.state.train_state import Inner, SyncCounters, TrainState
from lowcomm_jax.sync.round_programs import RoundPrograms, inner_shardings

PyTree = Any
Optimizers = tuple[PyTree, tuple[PyTree, ...]]
"""States of the inner optimizer, and of each fragment's outer one."""


class Making(NamedTuple):
    """How the arrays of a state come to be.

    Attributes:
      run: (jitted program, where its results lie, its arguments) -> its results.
      put: (host values, where they lie) -> arrays.
      value: a function without arguments -> its result, host values or shapes.
      stow: puts arrays into the host's memory (`offload.stow`).
    """

    run: Callable[..., PyTree]
    put: Callable[[PyTree, PyTree], PyTree]
    value: Callable[[Callable[[], PyTree]], PyTree]
    stow: Callable[[PyTree], PyTree]


def placed(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shapes that lie so; `shardings` may be a prefix of `tree`."""
    whole = jax.tree.broadcast(shardings, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, whole
    )


def _stowed(shapes: PyTree) -> PyTree:
    lies = jax.tree.map(lambda x: x.sharding.with_memory_kind(HOST), shapes)
    return placed(shapes, lies)


ARRAYS = Making(lambda program, out, *args: program(*args), place, lambda make: make(), stow)
SHAPES = Making(
    lambda program, out, *args: placed(jax.eval_shape(program, *args), out),
    placed,
    jax.eval_shape,
    _stowed,
)


def initial_state(programs: RoundPrograms, params: PyTree, making: Making = ARRAYS) -> TrainState:
    """Build the training state from the user's parameters.

    Args:
      params: the user's tree, of the programs' layout; its arrays are copied.
    """
    begin = start if programs.family is None else programs.family.initial_state
    return begin(programs, params, making)


def abstract_state(programs: RoundPrograms, params: PyTree) -> TrainState:
    """`initial_state` without arrays: leaves are `ShapeDtypeStruct`s with a sharding.

    Counters hold their values, since the host reads them.

    Args:
      params: shapes of the user's parameters.
    """
    return initial_state(programs, params, SHAPES)


def _optimizers(
    programs: RoundPrograms,
    params_R: dict[str, jax.Array],
    anchor: dict[str, jax.Array],
    making: Making,
) -> Optimizers:
    """As they start: in every region the inner one, the outer rules at the anchor."""
    opt = _of_regions(programs).opt
    init = jax.jit(jax.vmap(programs.step.init), out_shardings=opt)
    return making.run(init, opt, params_R), _outer(programs, anchor, making)


def start(
    programs: RoundPrograms,
    params: PyTree,
    making: Making,
    optimizers: Callable[..., Optimizers] = _optimizers,
) -> TrainState:
    """The state at step 0, without what a family adds.

    Args:
      optimizers: makes their states of (programs, the regions' parameters, the anchor, making).
    """
    layout, method, regions = programs.step.layout, programs.method, programs.regions
    k, shared, decided = len(programs.fragments), regions.sharding(), {}
    train, anchor, received = layout.select(params, "train"), {}, {}
    if method.has_anchor:
        count, axis = anchor_axis(programs)
        lies = leaf_shardings(regions, axis, programs.specs)
        anchor = _spread(making, train, count, lies, jnp.float32)
    if method.base == "received":
        lies = leaf_shardings(regions, REGION, programs.specs)
        received = _spread(making, train, regions.count, lies, jnp.float32)
    if method.schedule.remembers:
        decided = method.schedule.start()
    inner = _inner(programs, params, making)
    opt, outer = optimizers(programs, inner.params, anchor, making)
    state = TrainState(
        inner=dataclasses.replace(inner, opt=opt),
        frozen=making.put(jax.tree.map(_copy, layout.select(params, "frozen")), shared),
        anchor=anchor,
        received=received,
        outer=outer,
        codec=codec_states(programs, making),
        landing=landing_states(programs, making),
        rate=making.put(np.zeros(k, np.float32), shared),
        in_flight={},
        counters=SyncCounters.start(k, regions.count, decided),
        layout=layout,
        merge=_merge_states(programs, making),
    )
    if not programs.setup.offload:
        return state
    return state.replace(
        anchor=making.stow(state.anchor),
        received=making.stow(state.received),
        outer=making.stow(state.outer),
        merge=making.stow(state.merge),
    )


def _copy(x: Any) -> Any:
    """Arrays of its own: `place` may take those of the user as they are."""
    return x.copy() if isinstance(x, np.ndarray | jax.Array) else x


@functools.lru_cache(maxsize=256)
def _copies(count: int, dtype: Any, out: tuple[jax.sharding.Sharding, ...]):
    """Makes `count` copies of arrays; engines whose parameters are alike share the program."""

    def copies(leaves):
        return tuple(jnp.broadcast_to(jnp.asarray(x, dtype), (count, *x.shape)) for x in leaves)

    return jax.jit(copies, out_shardings=out)


def _spread(
    making: Making, tree: PyTree, count: int, shardings: PyTree, dtype: Any = None
) -> PyTree:
    """The same values `count` times, leaves `[count, ...]`, as `dtype` (None = their own)."""
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    out = tuple(treedef.flatten_up_to(shardings))
    return treedef.unflatten(making.run(_copies(count, dtype, out), out, tuple(leaves)))


def anchor_axis(programs: RoundPrograms) -> tuple[int, str | None]:
    """Length A of the anchors' leading axis and the mesh axis it lies on."""
    if programs.method.anchors == "per_region":
        return programs.regions.count, REGION
    return 1, None


def _inner(programs: RoundPrograms, params: PyTree, making: Making) -> Inner:
    """Without the optimizer's state."""
    layout, lies = programs.step.layout, _of_regions(programs)
    count, region = programs.regions.count, programs.regions.sharding(REGION)
    params_R = _spread(making, layout.select(params, "train"), count, lies.params)
    buffers = layout.select(params, "local", "average")
    nothing = {k: np.zeros(params_R[k].shape[1:], np.float32) for k in lies.rounding}
    return Inner(
        params=params_R,
        buffers=_spread(making, buffers, count, dict.fromkeys(buffers, region)),
        opt=(),
        step=making.put(np.zeros(count, np.int32), region),
        tokens=making.put(np.zeros((count, len(programs.fragments)), np.float32), region),
        rounding=_spread(making, nothing, count, lies.rounding),
    )


def _outer(
    programs: RoundPrograms, anchor: dict[str, jax.Array], making: Making
) -> tuple[PyTree, ...]:
    """One outer state per fragment, initialised on the fragment's own tree."""
    if not anchor:
        return ((),) * len(programs.fragments)
    method, cut, (_, axis) = programs.method, programs.fragments, anchor_axis(programs)

    def of_fragment(p: int) -> PyTree:
        rule = method.outer_of(p)
        out = _rule_shardings(programs, "outer", rule, p, axis)
        program = jax.jit(_outer_init, out_shardings=out, static_argnames="rule")
        given = functools.partial(program, rule=rule), out, cut.leaves(anchor, p), cut.rows(p)
        return making.run(*given)

    return tuple(map(of_fragment, range(len(cut))))


def _outer_init(leaves: PyTree, rows: PyTree, rule: optax.GradientTransformation) -> PyTree:
    return jax.vmap(rule.init)(fragmentation.take(leaves, rows))


def _merge_states(programs: RoundPrograms, making: Making) -> tuple[PyTree, ...]:
    rule, cut, setup = programs.method.merge, programs.fragments, programs.setup
    if rule is None:
        return ()

    def start() -> tuple[PyTree, ...]:
        given = setup.regions, setup.stacked
        return tuple(merge.initial_states(rule, cut.like(p), *given) for p in range(len(cut)))

    lies, remembers = programs.regions.sharding(), bool(jax.tree.leaves(rule.init(setup.regions)))
    return making.run(jax.jit(start, out_shardings=lies) if remembers else start, lies)


def codec_states(programs: RoundPrograms, making: Making = ARRAYS) -> tuple[PyTree, ...]:
    """Codec state of each fragment, leaves `[R, ...]`; residuals lie as leaves are coded."""
    states = tuple(_codec_state(programs, p, making) for p in range(len(programs.fragments)))
    return making.stow(states) if programs.setup.offload else states


def _codec_state(programs: RoundPrograms, p: int, making: Making) -> PyTree:
    exchange, regions = programs.exchange, programs.regions
    if exchange.codec is None:
        return ()
    like = programs.fragments.like(p)
    state = making.value(lambda: exchange.whole(like).init(like))
    specs = exchange.state_specs(state, like)
    out = jax.tree.map(lambda _, spec: regions.sharding(REGION, *spec), state, specs)
    return _spread(making, state, regions.count, out)


def landing_states(programs: RoundPrograms, making: Making = ARRAYS) -> tuple[PyTree, ...]:
    """State of each fragment's landing rule, leaves `[R, ...]`."""
    method, cut = programs.method, programs.fragments

    def of_fragment(p: int) -> PyTree:
        rule = method.landing_of(p)
        if rule is None:
            return ()
        out = _rule_shardings(programs, "landing", rule, p, REGION)
        state = making.value(
            lambda: rule.init({k: jnp.zeros(s.shape) for k, s in cut.like(p).items()})
        )
        return _spread(making, state, programs.regions.count, out)

    return tuple(map(of_fragment, range(len(cut))))


def _of_regions(programs: RoundPrograms) -> Inner:
    """Shardings of what is the regions' own."""
    layout = programs.step.layout
    return inner_shardings(programs.setup, layout, layout.train_shapes(), programs.specs)


def _rule_shardings(programs: RoundPrograms, name: str, rule, p: int, lead: str | None) -> PyTree:
    """`rule_shardings` on the leaves of fragment p."""
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
