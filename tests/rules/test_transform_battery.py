"""What every transform of both rooms must do, whatever its rule: a registry and its checks."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lowcomm_jax import landing, outer

REGIONS = 3


class Case(NamedTuple):
    name: str
    factory: Callable[[], optax.GradientTransformationExtraArgs]
    trees: tuple[str, ...] = ()  # keywords that take a tree like the updates
    scalars: dict[str, Any] = {}  # keywords that take a scalar  # noqa: RUF012


FLIGHT = {"trees": ("displacement",), "scalars": {"staleness": jnp.int32(5), "step": jnp.int32(9)}}
EAGER = {"trees": ("own", "own_late"), "scalars": {"weight": jnp.float32(0.3)}}


def ramp(count):
    return 0.1 + 0.01 * jnp.asarray(count, jnp.float32)


def taylor(**keywords):
    return lambda: landing.taylor_delay_correction(0.3, **keywords)


CASES = [
    Case("nesterov", outer.nesterov),
    Case("nesterov_schedule", lambda: outer.nesterov(ramp, 0.6)),
    Case("heavy_ball", lambda: outer.heavy_ball(0.3, 0.6)),
    Case("average", outer.average),
    Case("sgd", lambda: outer.sgd(0.3)),
    Case("delayed_nesterov", lambda: outer.delayed_nesterov(0.3, 0.6, 3, 0.2)),
    Case("delayed_nesterov_schedule", lambda: outer.delayed_nesterov(ramp, 0.6, 2)),
    Case("gossip", lambda: outer.gossip(0.3, 0.7, 0.4), ("group_anchor",)),
    Case("gossip_nesterov", lambda: outer.gossip(0.3, 0.7, 0.4, "nesterov"), ("group_anchor",)),
    Case("eager_sgd", lambda: outer.eager(outer.sgd(0.3)), **EAGER),
    Case("eager_nesterov", lambda: outer.eager(outer.nesterov(0.3, 0.6)), **EAGER),
    Case("momentum_average", lambda: outer.momentum_average(0.3, 0.6)),
    Case("restarting", lambda: outer.restarting(0.3, 0.6, 2), scalars={"round": jnp.int32(4)}),
    Case("chain", lambda: optax.chain(outer.nesterov(), optax.clip_by_global_norm(0.7))),
    Case("replace", landing.replace, **FLIGHT),
    Case("blend", lambda: landing.blend(0.3), **FLIGHT),
    Case("replay", landing.replay, **FLIGHT),
    Case("taylor_off", taylor(mode="off"), **FLIGHT),
    Case("taylor_fixed", taylor(mode="fixed"), **FLIGHT),
    Case("taylor_units", taylor(mode="gradient_units", learning_rate=0.2), **FLIGHT),
    Case("taylor_units_schedule", taylor(mode="gradient_units", learning_rate=ramp), **FLIGHT),
    Case("taylor_norm", taylor(mode="norm"), **FLIGHT),
    Case("taylor_norm_fragment", taylor(mode="norm", scope="fragment"), **FLIGHT),
    Case("taylor_decay", taylor(mode="norm", learning_rate=ramp, weight_decay=0.1), **FLIGHT),
]
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])

SHAPES = {
    "nested": {"matrix": (3, 5), "vector": (8,)},
    "scalar": (),
    "one": (1,),
    "cube": (8, 3, 7),
}


def draw(seed, shapes=SHAPES, lead=()):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal((*lead, *shape)), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def arguments(case, seed=0, shapes=SHAPES, lead=()):
    """Updates, parameters and keywords of one call."""
    keywords = {name: draw(seed + 2 + i, shapes, lead) for i, name in enumerate(case.trees)}
    scalars = {name: jnp.broadcast_to(value, lead) for name, value in case.scalars.items()}
    return draw(seed, shapes, lead), draw(seed + 1, shapes, lead), keywords | scalars


def call(rule):
    return lambda updates, state, params, keywords: rule.update(updates, state, params, **keywords)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.aval.weak_type), tree)


def assert_close(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@every_case
def test_state_and_updates_are_a_fixed_point(case):
    rule = case.factory()
    updates, params, keywords = arguments(case)
    state = rule.init(params)
    assert isinstance(rule, optax.GradientTransformationExtraArgs)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    result, after = jax.jit(call(rule))(updates, state, params, keywords)
    assert types(after) == types(state)
    assert types(result) == types(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((result, after)))
    if case.name not in ("gossip", "gossip_nesterov", "taylor_decay"):
        same, _ = jax.jit(call(rule))(updates, state, None, keywords)
        assert_close(same, result)


@every_case
def test_narrow_updates_keep_fp32_state_and_come_back_in_the_dtype_of_params(case):
    rule = case.factory()
    updates, params, keywords = arguments(case)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (updates, params))
    for given, expected in ((narrow[1], jnp.bfloat16), (params, jnp.float32)):
        state = rule.init(given)
        result, after = call(rule)(narrow[0], state, given, keywords)
        assert types(after) == types(state)
        assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype(expected)}
        floating = [x for x in jax.tree.leaves(after) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert all(leaf.dtype == jnp.float32 for leaf in floating)


@every_case
def test_the_second_call_compiles_nothing(case):
    rule = case.factory()
    step = jax.jit(call(rule))
    calls = [arguments(case, seed) for seed in (0, 10, 20)]
    state, compiled = rule.init(calls[0][1]), []

    def advance(updates, params, keywords):
        nonlocal state
        _, state = step(updates, state, params, keywords)

    for one_call in calls:
        compiled.append(compilations(functools.partial(advance, *one_call)))
    assert compiled[0] > 0, "the event of the compiler has another name: nothing was counted"
    assert compiled[1:] == [0, 0]


@every_case
def test_shardings_are_a_fixed_point(case):
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    rule = case.factory()

    def shard(x):
        spec = PartitionSpec("fsdp") if x.ndim and x.shape[0] % 8 == 0 else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    updates, params, keywords = jax.tree.map(shard, arguments(case))
    state = jax.tree.map(shard, rule.init(params))

    @jax.jit
    def step(updates, state, params, keywords):
        result, after = call(rule)(updates, state, params, keywords)
        return optax.apply_updates(params, result), after

    moved, after = step(updates, state, params, keywords)
    for before, now in zip(
        jax.tree.leaves((params, state)), jax.tree.leaves((moved, after)), strict=True
    ):
        assert now.sharding.is_equivalent_to(before.sharding, now.ndim)


@every_case
def test_unknown_arguments_are_ignored(case):
    rule = case.factory()
    updates, params, keywords = arguments(case)
    state = rule.init(params)
    unknown = {"value": 1.0, "group_size": jnp.int32(3), "nothing": None}
    plain = call(rule)(updates, state, params, keywords)
    assert_close(call(rule)(updates, state, params, keywords | unknown), plain)
    chained = optax.chain(optax.identity(), rule)
    result, _ = chained.update(updates, chained.init(params), params, **keywords, **unknown)
    assert_close(result, plain[0])


@every_case
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 1, 3)], ids=str)
def test_a_bare_array_of_any_shape(case, shape):
    rule = case.factory()
    updates, params, keywords = arguments(case, shapes=shape)
    result, state = call(rule)(updates, rule.init(params), params, keywords)
    assert types(result) == types(params)
    assert types(state) == types(rule.init(params))
    assert np.isfinite(result).all()


@every_case
def test_jit_vmap_over_regions_equals_one_region_at_a_time(case):
    rule = case.factory()
    step = jax.jit(jax.vmap(call(rule)))
    first = arguments(case, 0, lead=(REGIONS,))
    second = arguments(case, 10, lead=(REGIONS,))
    state = jax.vmap(rule.init)(first[1])
    _, state = step(first[0], state, *first[1:])
    batched = step(second[0], state, *second[1:])
    for r in range(REGIONS):
        one, two = jax.tree.map(lambda x: x[r], (first, second))  # noqa: B023
        _, alone = call(rule)(one[0], rule.init(one[1]), *one[1:])
        expected = call(rule)(two[0], alone, *two[1:])
        assert_close(jax.tree.map(lambda x: x[r], batched), expected)  # noqa: B023


def test_every_public_transform_is_in_the_registry():
    built = {name for case in CASES for name in (case.name, case.name.split("_")[0])}
    factories = set(outer.__all__) | set(landing.__all__)
    helpers = {"look_ahead"}  # what a method hands out, no transform
    classes = {name for name in factories if not name.islower()}  # states
    missing = factories - helpers - classes - built - {"taylor_delay_correction"}
    assert not missing
