"""Where the state of an outer or landing rule of one's own lies, on regions of several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.methods import Method
from lowcomm_jax.params.sharding import leaf_of
from lowcomm_jax.schedule import Staggered

STATES = {
    "mapped": lambda params: {"m": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros(())},
    "by name": lambda params: {"m": {k: jnp.zeros_like(x) for k, x in params.items()}},
    "listed": lambda params: [jnp.zeros_like(x) for x in jax.tree.leaves(params)],
    "renamed": lambda params: {"m": jnp.zeros(sum(x.size for x in jax.tree.leaves(params)))},
}


def rule(style: str, sign: float) -> optax.GradientTransformationExtraArgs:
    """A momentum of what it is given, in a state of this style; "renamed" never changes its own."""

    def update(given, state, params=None, **extra):
        if style == "renamed":
            return given, state
        keys = sorted(given)
        old = state if style == "listed" else [state["m"][k] for k in keys]
        new = [0.3 * m + given[k] for m, k in zip(old, keys)]
        kept = new if style == "listed" else {**state, "m": dict(zip(keys, new))}
        return {k: sign * x for k, x in zip(keys, new)}, kept

    return optax.GradientTransformationExtraArgs(STATES[style], update)


def engine(place: str, style: str, fsdp: int) -> lc.Engine:
    def loss_fn(params, batch, rng):
        return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)

    rules = {"outer": lc.outer.sgd(0.7), place: rule(style, -0.7 if place == "outer" else 0.4)}
    method = Method("own", Staggered(2, delay=1), **rules)
    mesh = lc.make_mesh(region=2, fsdp=fsdp, devices=jax.devices()[: 2 * fsdp])
    specs = lambda name, leaf: P("fsdp")  # noqa: E731
    return lc.Engine(loss_fn, optax.sgd(0.01), method, 2, mesh=mesh, specs=specs)


def start(run: lc.Engine):
    return run.init({"w": jnp.ones((8, 16)), "b": jnp.zeros(16)})


@pytest.mark.parametrize("place", ["outer", "landing"])
@pytest.mark.parametrize("style", ["mapped", "by name", "listed"])
def test_arrays_of_a_leafs_shape_lie_as_the_leaf(place, style):
    states = getattr(start(engine(place, style, 2)), place)
    largest = max(jax.tree.leaves(states), key=lambda x: x.size)
    assert largest.shape[1:] == (8, 16) and largest.sharding.shard_shape(largest.shape)[1] == 4


def test_a_landing_state_that_is_cut_gives_the_numbers_of_a_whole_one():
    batches = np.random.default_rng(0).standard_normal((7, 2, 4, 8)).astype(np.float32)
    runs = [engine("landing", "mapped", devices) for devices in (2, 1)]
    cut, whole = (run.run(start(run), list(batches))[0] for run in runs)
    assert cut.landing[0]["m"]["w"].sharding.shard_shape((2, 8, 16)) == (1, 4, 16)
    for name, x in jax.device_get(lc.region_params(whole)).items():
        ours = jax.device_get(lc.region_params(cut))[name]
        np.testing.assert_allclose(ours, x, rtol=1e-5, atol=1e-6)
    assert float(jnp.max(jnp.abs(whole.landing[0]["m"]["w"]))) > 1e-3


@pytest.mark.parametrize("place", ["outer", "landing"])
def test_an_array_under_no_leafs_name_is_refused_where_leaves_are_cut(place):
    message = rf"{place}: its state \['m'\] \[144\] stands under no leaf's name"
    with pytest.raises(ValueError, match=message):
        start(engine(place, "renamed", 2))
    state = start(engine(place, "renamed", 1))
    assert jax.tree.leaves(getattr(state, place))[0].shape[1:] == (144,)


def test_a_leaf_may_have_the_name_of_a_rules_own_field():
    like = {"m": jax.ShapeDtypeStruct((8,), "float32"), "w": jax.ShapeDtypeStruct((4,), "float32")}
    paths, _ = jax.tree_util.tree_flatten_with_path({"m": like})
    assert [leaf_of(path, {"m": like}, like) for path, _ in paths] == ["m", "w"]
