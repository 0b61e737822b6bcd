"""With pipeline stages: nothing recompiles, and offloaded state gives the same numbers."""

import functools

import jax
import numpy as np
import pytest
from compilations import compilations
from mesh.staged_runs import MODES, batches, mode, start

from lowcomm_jax.mesh.offload import HOST

STEPS = 7
QUICK = ("routed",)  # the others compile for long
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODES]
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@pytest.fixture(scope="module")
def trained():
    @functools.cache
    def train(name):
        engine = mode(name)
        state, _ = engine.run(engine.init(start()), batches(STEPS))
        return engine, state

    return train


def copied(state):
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_compiles_after_warm_up(trained, name):
    engine, state = trained(name)
    state = copied(state)
    assert compilations(lambda: engine.run(state, batches(STEPS))[0].anchor) == 0


@pytest.mark.parametrize("name", NAMES)
def test_offloaded_equals_on_the_device(trained, name):
    _, expected = trained(name)
    engine = mode(name, offload=True)
    state, _ = engine.run(engine.init(start()), batches(STEPS))
    for tree in (state.anchor, state.outer, state.codec):
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)}
        assert kinds <= {HOST}
    assert any(x.sharding.memory_kind == HOST for x in jax.tree.leaves(state.anchor))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
        if isinstance(b, jax.Array):
            assert a.sharding.spec == b.sharding.spec
