"""State in pinned host memory: the same numbers, the same memory kinds after every step."""

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.mesh.offload import HOST

STEPS, R = 13, 4
METHODS = {
    "diloco": lambda: lc.methods.diloco(4, codec=lc.compression.make("stat2_ef")),
    "streaming": lambda: lc.methods.streaming_diloco(5, 2, 3, 0.3, pattern="balanced"),
    "cocodc": lambda: lc.methods.cocodc(6, 3, 2, score="drift", pattern="balanced"),
    "eager": lambda: lc.methods.eager_diloco(4),
    "async": lambda: lc.methods.async_local_sgd(4, (1.0, 0.6, 0.8, 0.9)),
}


def train(method, offload, mesh=None):
    mesh = lc.make_mesh(region=2, devices=jax.devices()[:2]) if mesh is None else mesh
    engine = lc.Engine(loss_fn, optax.adamw(0.02), method, R, mesh=mesh, offload=offload)
    state = engine.init(oracle.make_params())
    batches = oracle.make_batches(steps=STEPS, regions=R)
    state, _ = engine.run(state, [oracle.step_batch(batches, t) for t in range(1, STEPS + 1)])
    return engine, state


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("diloco", "eager", "async")]


@pytest.mark.parametrize("name", ["cocodc", *SLOW])
def test_offloaded_equals_on_the_device(name):
    engine, state = train(METHODS[name](), True)
    other_engine, other = train(METHODS[name](), False)
    device = jax.devices()[0].default_memory().kind
    snapshots = [f.snapshot for f in state.in_flight.values()]
    for tree in (state.anchor, state.received, state.outer, state.codec, snapshots):
        assert kinds(tree) <= {HOST}
    assert kinds(state.inner) == {device} == kinds(other)
    assert kinds(lc.global_params(state)) == {device}
    assert lc.consensus.variance(state) == lc.consensus.variance(other)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    done, expected = engine.finish(state), other_engine.finish(other)
    assert kinds(done.anchor) == {HOST}
    for key, x in done.anchor.items():
        np.testing.assert_array_equal(x, expected.anchor[key])


def test_it_survives_a_checkpoint(tmp_path):
    engine, state = train(METHODS["streaming"](), True)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, extra={}, config={}, method=engine.method)
        restored = checkpoints.restore(engine, oracle.make_params(), config={}).state
    assert restored.in_flight
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
        if isinstance(b, jax.Array):
            assert a.sharding.memory_kind == b.sharding.memory_kind
