"""What a region that comes back has received: the anchor that it starts from."""

import jax
import numpy as np
import optax
import oracle
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.recovery.rejoin import rejoin_regions

SPEEDS = (1.0, 1.0, 1.0)
MESH = lc.make_mesh(devices=jax.devices()[:1])


def test_it_has_received_the_anchor_and_the_others_keep_what_they_had():
    """Its next pseudo-gradient is what it has gone from there."""
    method = lc.methods.async_local_sgd(4, SPEEDS)
    one = lc.Engine(loss_fn, optax.sgd(0.05), method, len(SPEEDS), mesh=MESH)
    with jax.numpy_dtype_promotion("standard"):
        state, fresh = one.init(oracle.make_params()), one.init(oracle.make_params())
        # The anchor has moved on from what regions received.
        state = state.replace(anchor=jax.tree.map(lambda x: x + 1, state.anchor))
        before = jax.tree.map(np.array, state.received)
        comes = np.array([False, True, False])
        state = rejoin_regions(one.sync_loop(state), state, fresh, comes)
    assert before.keys() == oracle.SHAPES.keys()
    for name, x in state.received.items():
        np.testing.assert_array_equal(x[1], state.anchor[name][0])
        np.testing.assert_array_equal(x[::2], before[name][::2])
        assert (before[name] != state.anchor[name]).all()
