"""The state that a region begins with after it has caught up."""

import numpy as np
import optax
from params.tiny_runs import R, X, engine

import lowcomm_jax as lc
from lowcomm_jax.recovery.rejoin import start_from_anchor


def square_loss(params, batch, rng):
    return ((params["w"] - batch["x"]) ** 2).mean()


def test_it_has_the_anchor_and_counts_no_tokens():
    """Tokens of values that are given up would weigh in the first payload after the rejoin."""
    inner = optax.sgd(optax.linear_schedule(0.1, 0.0, 50), momentum=0.9)
    one = engine(square_loss, lc.methods.diloco(4), inner, weights="tokens")
    state = one.init({"w": np.float32(3.0)})
    for batch in X[:3]:
        state, _ = one.step(state, batch)
    assert (np.asarray(state.inner.tokens) == 3).all()
    counters = state.counters.copy()
    counters.step = np.int64(7)  # where the others are
    moments = np.asarray(optax.tree.get(state.inner.opt, "trace")["w"])
    state = start_from_anchor(one.sync_loop(state), state.replace(counters=counters))
    assert (np.asarray(state.inner.tokens) == 0).all()
    assert np.asarray(state.inner.params["w"]).tolist() == [3.0] * R
    assert np.asarray(state.inner.step).tolist() == [7] * R
    assert np.asarray(optax.tree.get(state.inner.opt, "count")).tolist() == [7] * R
    np.testing.assert_array_equal(optax.tree.get(state.inner.opt, "trace")["w"], moments)
    assert np.abs(moments).min() > 0
