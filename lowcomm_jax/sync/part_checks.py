"""Finds parts of a method that break their contract, and would silently train something else.

`call_problems` checks signatures, before parameters are known. `part_problems` traces each part
once, on shapes, and compares the results with the contracts of `Method`, `Merge` and `Codec`. It
compiles nothing and uses no device. The package's own codecs and merge rules are not traced; tests
check them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax.compression import Codec, LeafCodec, PerTensor, UnitCodec
from lowcomm_jax.compression.placement import Placement
from lowcomm_jax.compression.two_shot import per_tensor
from lowcomm_jax.methods.base import (
    TOLD,
    Method,
    RuleCall,
    fragment_codecs,
    per_fragment,
    rule_calls,
    rule_of,
)
from lowcomm_jax.optimizers import state_field
from lowcomm_jax.params.fragments import Fragments
from lowcomm_jax.params.layout import Layout
from lowcomm_jax.rules.merge import Merge, initial_states, merge_leaves, tensors, weigh_leaves
from lowcomm_jax.setup import Setup

PyTree = Any


def call_problems(method: Method, loss_fn: Callable) -> list[str]:
    """Functions that cannot be called as the engine calls them, one line with its fix each.

    Args:
      loss_fn: of the engine.
    """
    found = []
    if not _takes(loss_fn, 3):
        found.append(f"loss_fn{inspect.signature(loss_fn)}: write loss_fn(params, batch, rng)")
    for call in rule_calls(method):
        found += _signature_problems(call)
    hands_out, merge = method.hands_out, method.merge
    if hands_out is not None and not _takes(hands_out, 2):
        wrong = inspect.signature(hands_out) if callable(hands_out) else f"={hands_out!r}"
        found.append(f"hands_out{wrong}: give a function (anchor, outer_state) -> values")
    if isinstance(merge, Merge):
        for given in (
            "update(self, delta_RxN, state, weight_R, kind, momentum)",
            "weigh(self, norm_R, state, weight_R, kind)",
        ):
            name = given.partition("(")[0]
            function = getattr(merge, name)
            if not _takes(function, given.count(",")):
                found.append(
                    f"merge: {type(merge).__name__}.{name}{inspect.signature(function)}: write "
                    + given
                )
    return found


def part_problems(
    method: Method, cut: Fragments, regions: int, stacked: Sequence[str]
) -> list[str]:
    """Results of parts that their contract does not allow, one line with its fix each.

    Args:
      cut: the parameters in fragments.
      regions: number of regions of the run.
      stacked: path prefixes of leaves with a leading layer axis.
    """
    found: list[str] = []
    apart = any(per_fragment(call.rules) for call in rule_calls(method))
    checked: list[PyTree] = []
    for p in range(len(cut)):
        like = {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in cut.like(p).items()}
        if like in checked and not apart:
            continue
        checked.append(like)
        if method.signal == "progress" and method.has_anchor:
            found += _rule_problems(method, p, like, regions, stacked)
        for codec in fragment_codecs(method):
            if not _of_package(codec):
                found += _codec_problems(codec, like)
    values = {"values": jax.ShapeDtypeStruct((2,), jnp.float32)}
    for call in rule_calls(method):
        if not call.by_fragment:
            found += _transform_problems(call, 0, values)
    return list(dict.fromkeys(found))  # fragments may share leaves


def optimizer_problems(
    setup: Setup, layout: Layout, no_loss: str | None = None
) -> tuple[list[str], bool]:
    """What the inner optimizer asks for at an update, and a step cannot give.

    Args:
      no_loss: why a step gives it no loss, and the fix; None = it does.

    Returns:
      (problems, one line with its fix each; whether its update takes `value`, the step's loss).
    """
    inner, like = setup.optimizer, layout.tree(layout.train_shapes())
    loss = {} if no_loss else {"value": jax.ShapeDtypeStruct((), jnp.float32)}
    missing = _missing(inner, like, loss)
    if missing == []:
        return [], not no_loss
    missing = missing or _missing(inner, like, {})
    if not missing:
        return [], False
    why = no_loss or "and a wrapper around it does not hand it on: leave that wrapper out"
    if missing != ["value"]:
        why = "and a step gives value, its loss, alone: use an optimizer without a line search"
    return [f"the inner optimizer's update needs {', '.join(missing)}, {why}"], False


def idle_period(inner: optax.GradientTransformation, like: PyTree, method: Method) -> str | None:
    """Why periods do not end with a move of an inner optimizer that gathers gradients.

    Args:
      like: shapes of the trained leaves, in the user's tree.

    Returns:
      One line with its fix; None where periods end with a move, or the method counts none. None,
      too, for an optimizer that cannot update leaves without entries.
    """
    if method.signal != "progress" or not method.has_anchor:
        return None
    if not _gathered(jax.eval_shape(inner.init, like)):
        return None
    # A step counts the same whatever the leaves hold, so they are empty here.
    empty = jax.tree.map(lambda x: jnp.zeros((0,) * len(x.shape), x.dtype), like)
    H = method.schedule.period

    @jax.jit
    def after_a_period():
        def step(_, state):
            return inner.update(empty, state, empty, value=jnp.float32(0))[1]

        return _gathered(jax.lax.fori_loop(0, H, step, inner.init(empty)))

    try:
        gathered = after_a_period()
    except (TypeError, ValueError):
        return None
    if not any(gathered):
        return None
    return (
        f"period={H} counts steps, and the inner optimizer gathers gradients over several before it"
        f" moves: the last of these {H} steps moves nothing, and a period without a move sends "
        "exact zeros, on which momentum of the outer rule acts all the same; use a period that is "
        "a multiple of the optimizer's k, or Engine(accumulate=k) in its place"
    )


def _gathered(state: PyTree) -> list[Any]:
    """Gradients gathered since the last move, of each part that moves once in several steps."""
    kinds = optax.MultiStepsState | optax.ApplyEvery
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    found = [x for x in nodes if isinstance(x, kinds)]
    return [x.mini_step if isinstance(x, optax.MultiStepsState) else x.count for x in found]


def _missing(inner, like: PyTree, given: dict[str, Any]) -> list[str] | None:
    """Keywords that an update lacks beside those `given`; None = it cannot be called so."""
    state = jax.eval_shape(inner.init, like)

    def update(updates, state, params, keywords):
        return inner.update(updates, state, params, **keywords)

    try:
        jax.eval_shape(update, like, state, like, given)
    except TypeError as error:
        _, required, names = str(error).partition("required keyword-only argument")
        return re.findall(r"'(\w+)'", names) if required else None
    return []


def _takes(fn: Any, positional: int, keywords: Sequence[str] = ()) -> bool:
    """Whether a function may be called so; True where its signature is not known."""
    try:
        inspect.signature(fn).bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError:
        return False
    except ValueError:  # of `signature`: there is none
        pass
    return True


def _signature_problems(call: RuleCall) -> Iterator[str]:
    for rule in call.rules if per_fragment(call.rules) else (call.rules,):
        if not isinstance(rule, optax.GradientTransformation):
            continue  # refused by the table, or None
        if not _takes(rule.update, 3, call.told):
            told = ", ".join(("*", *call.told, "")) if call.told else ""
            write = f"update({call.first}, state, params=None, {told}**extra)"
            told_more = _takes(rule.update, 3, TOLD) and not call.told
            yield f"{call.name}: update{inspect.signature(rule.update)}" + (
                f" is not told {', '.join(TOLD)} here: use a rule that needs none, {write}"
                if told_more
                else f": write {write}; **extra takes what it does not use"
            )


def _rule_problems(
    method: Method, p: int, like: PyTree, regions: int, stacked: Sequence[str]
) -> list[str]:
    """Problems of one fragment's rules: merge, outer, hands_out, then landing and the others."""
    outer, *others = (call for call in rule_calls(method) if call.by_fragment)
    state = jax.eval_shape(method.outer_of(p).init, like)
    found = [] if method.merge is None else _merge_problems(method, state, like, regions, stacked)
    found += _transform_problems(outer, p, like)
    if method.hands_out is not None:
        given = jax.eval_shape(method.hands_out, like, state)
        found += _differences("hands_out: what it gives", given, like, "give trees of the anchor")
    for call in others:
        found += _transform_problems(call, p, like)
    return found


def _transform_problems(call: RuleCall, p: int, like: PyTree) -> list[str]:
    """Problems of what fragment p's rule gives, called on leaves of these shapes."""
    name, rule = call.name, rule_of(call.rules, p)
    if rule is None:
        return []
    share, number = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.int32))
    shapes = dict.fromkeys(("displacement", "group_anchor", "own", "own_late"), like)
    shapes |= dict.fromkeys(("weight", "weight_late"), share)
    told = {keyword: shapes.get(keyword, number) for keyword in call.told}
    state = jax.eval_shape(rule.init, like)
    try:
        updates, new = jax.eval_shape(rule.update, like, state, like, **told)
    except TypeError as error:
        if "positional argument" not in str(error):
            raise
        # Of a function that Optax wrapped, `call_problems` sees the wrapper's signature.
        return [f"{name}: {error}: write update(delta, state, params=None, **extra)"]
    fix = "return what fits the tree of the first argument, leaf by leaf"
    keep = "return a state like that of init: its tree, shapes and dtypes"
    return [
        *_differences(f"{name}: the result", updates, like, fix),
        *_differences(f"{name}: the new state", new, state, keep),
    ]


def _merge_problems(
    method: Method, outer_state: PyTree, like: PyTree, regions: int, stacked: Sequence[str]
) -> list[str]:
    rule, momentum = method.merge, None
    if rule.momentum is not None:
        try:
            momentum = state_field(outer_state, rule.momentum)
        except ValueError as error:
            return [f"merge: {type(rule).__name__} reads {rule.momentum!r}: {error}"]
        if momentum is None:
            return [
                f"merge: {type(rule).__name__} reads {rule.momentum!r} of the outer rule's state, "
                "which has no such entry; use an outer rule that has it, or momentum = None"
            ]
    if _is_ours(rule):
        return []
    rows = regions if rule.reads == "payloads" else 1
    delta = {k: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for k, x in like.items()}
    weight = jax.ShapeDtypeStruct((rows,), jnp.float32)
    states = jax.eval_shape(lambda: initial_states(rule, like, regions, stacked))
    weighed = states
    if rule.reads == "norms":
        norms = jax.ShapeDtypeStruct((regions, tensors(like, stacked)), jnp.float32)
        counted = jax.ShapeDtypeStruct((regions,), jnp.float32)
        _, weighed = jax.eval_shape(
            lambda n, s, w: weigh_leaves(rule, n, s, w, like, stacked), norms, states, counted
        )
    merged = jax.eval_shape(
        lambda d, s, w, m: merge_leaves(rule, d, s, w, m, stacked), delta, states, weight, momentum
    )
    name, fix = f"merge: {type(rule).__name__}.update's", "return it without the axis of regions"
    keep = "return a state like that of init: its tree, shapes and dtypes"
    return [
        *_differences(f"merge: {type(rule).__name__}.weigh's state", weighed, states, keep),
        *_differences(f"{name} direction", merged.direction, like, fix),
        *_differences(f"{name} state", merged.state, states, keep),
    ]


def _codec_problems(codec: Codec, like: PyTree) -> list[str]:
    """Problems of a codec of the user's, one for each leaf where it codes leaf by leaf."""
    inner = per_tensor(codec)
    if inner is None:
        return _coded_problems(codec, like)
    found = []
    for name, x in like.items():
        # The units first: where they have another shape, so has the leaf.
        of_units = [] if x.size == 0 else _unit_problems(inner, name, x)
        found += of_units or _coded_problems(codec, {name: x})
    return found


def _unit_problems(codec: PerTensor, name: str, x: Any) -> list[str]:
    own = codec.codec_of(name)
    if _of_package(own) or not isinstance(own, UnitCodec):
        return []
    place = Placement(x.shape, codec.is_stacked(name), own.unit)
    units = jax.eval_shape(lambda x: place.to_units(place.split(x)), x)
    payload = jax.eval_shape(lambda x: own.encode(x, place.matrix(), x), units)
    grid = units.shape[:3]
    found = [
        f"codec {own.name} of {name}: its payload {key!r} is {list(array.shape)}: encode returns "
        f"arrays {[*grid, '...']}, one entry a unit, or {[grid[0], 1, 1, '...']}, one a matrix"
        for key, array in payload.items()
        if array.shape[:3] not in (grid, (grid[0], 1, 1), (*grid[:2], 1))
    ]
    if found:
        return found
    decoded = jax.eval_shape(lambda coded: own.decode(coded, place.sides), payload)
    fix = "decode gives fp32 units of the shape encoded"
    return _differences(f"codec {own.name} of {name}: decoded", decoded, units, fix)


def _coded_problems(codec: Codec, like: PyTree) -> list[str]:
    """What is wrong with a codec's state, its decoded values and its count of bytes."""
    name = f"codec {codec.name}: "
    state = jax.eval_shape(lambda: codec.init(like))
    params = (like,) if codec.reads_params else ()
    payload, new = jax.eval_shape(codec.encode, like, state, *params)
    decoded = jax.eval_shape(lambda coded: codec.decode(coded, like), payload)
    keep = "encode returns a state like that of init: its tree, shapes and dtypes"
    found = _differences(f"{name}the new state", new, state, keep)
    found += _differences(f"{name}decoded", decoded, like, "decode gives fp32 of the shape encoded")
    held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(payload))
    said = codec.nbytes(like)
    if said != held:
        found.append(
            f"{name}nbytes says {said} bytes, and the payload's buffers hold {held}: return "
            f"{held}, or pack what travels"
        )
    return found


def _of_package(codec: Any) -> bool:
    """Whether a codec, and all that it holds, is the package's."""
    if isinstance(codec, tuple):
        return all(map(_of_package, codec))
    if not isinstance(codec, Codec | UnitCodec | LeafCodec):
        return True
    fields = dataclasses.fields(codec) if dataclasses.is_dataclass(codec) else ()
    return _is_ours(codec) and all(_of_package(getattr(codec, f.name)) for f in fields)


def _is_ours(part: Any) -> bool:
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def _differences(what: str, found: PyTree, wanted: PyTree, fix: str) -> list[str]:
    """Where two trees of shapes differ, one line a leaf."""
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        trees = f"{jax.tree.structure(found)}, not {jax.tree.structure(wanted)}"
        return [f"{what} is a tree {trees}: {fix}"]
    with_path, leaves = jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted)
    return [
        f"{what}{f' at {jax.tree_util.keystr(path)}' if path else ''} is {_shape(x)}, not "
        f"{_shape(y)}: {fix}"
        for (path, x), y in zip(with_path, leaves, strict=True)
        if (x.shape, x.dtype) != (y.shape, y.dtype)
    ]


def _shape(x: Any) -> str:
    return f"{x.dtype.name}{list(x.shape)}"
