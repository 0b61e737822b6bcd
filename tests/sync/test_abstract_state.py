"""The state that programs are lowered on is the one of the first step, without arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn
from same_as_cases import coded

import lowcomm_jax as lc
from lowcomm_jax.sync.initial_state import abstract_state

LATE = {"pattern": "balanced"}
METHODS = {
    "ddp": lambda: lc.methods.ddp(),
    "residuals in flight": lambda: lc.methods.streaming_diloco(
        4, 2, 1, 0.3, codec=coded("int4", 0.9), **LATE
    ),
    "landing rules with state": lambda: dataclasses.replace(
        lc.methods.streaming_diloco(4, 2, 1, 0.3, **LATE), landing=optax.trace(0.9)
    ),
    "channels": lambda: lc.methods.sparta(0.2, delay=3, period=5),
    "local servers": lambda: lc.methods.halos(2, (1.0, 1.0, 0.5), ((0, 1), (2,))),
    "local servers with a codec": lambda: lc.methods.halos(
        2, (1.0, 1.0, 0.5), ((0, 1), (2,)), codec=coded("int8", 0.9)
    ),
    "anchors received": lambda: lc.methods.async_local_sgd(4, (1.0, 1.0, 0.5), dynamic=False),
    "anchors apart": lambda: lc.methods.noloco(3),
}


def described(tree):
    def one(leaf):
        if isinstance(leaf, np.ndarray | np.generic):
            return leaf.tolist()
        return leaf.shape, leaf.dtype, leaf.sharding

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): one(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("name", METHODS)
def test_it_has_the_shapes_and_places_of_the_first_state(name):
    mesh = lc.make_mesh(region=3, fsdp=2, devices=jax.devices()[:6])
    engine = lc.Engine(loss_fn, optax.adam(0.01), METHODS[name](), 3, mesh=mesh)
    params = oracle.make_params()
    params["c"] = params["c"].astype(jnp.bfloat16)
    state = engine.init(params)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    abstract = abstract_state(engine.sync_loop(state).programs, shapes)
    found, expected = described(abstract), described(state)
    assert found.keys() == expected.keys()
    for leaf, what in expected.items():
        assert found[leaf] == what, leaf


def test_what_is_offloaded_lies_on_the_host_in_its_shapes_too():
    mesh = lc.make_mesh(region=3, fsdp=2, devices=jax.devices()[:6])
    method = METHODS["residuals in flight"]()
    engine = lc.Engine(loss_fn, optax.adam(0.01), method, 3, mesh=mesh, offload=True)
    state = engine.init(params := oracle.make_params())
    abstract = abstract_state(engine.sync_loop(state).programs, params)
    kinds = set()
    for leaf, like in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
            assert leaf.sharding.memory_kind == like.sharding.memory_kind
            assert leaf.sharding.is_equivalent_to(like.sharding, like.ndim)
            kinds.add(leaf.sharding.memory_kind)
    assert kinds == {"device", "pinned_host"}
