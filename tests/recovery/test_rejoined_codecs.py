"""A region that comes into a run encodes as one that has not sent anything yet."""

import jax
import numpy as np
import oracle
import pytest
from regions.together import batches, engine, rows

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.compression import error_feedback, make
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.recovery.precompile import precompile

R = 2
LOW_RANK = {"rank": 1, "least": 1.0}  # the parameters' matrices are small
CODECS = {
    "random_k": make("random_k", one_in=3, seed=5),
    "low_rank": error_feedback(make("low_rank", seed=5, **LOW_RANK)),
}


@pytest.mark.parametrize("name", list(CODECS))
def test_codecs_begin_as_at_step_0(name, tmp_path):
    codec = CODECS[name]
    method = lc.methods.diloco(4, lc.outer.nesterov(0.6, 0.85), codec=codec)
    one = engine(method, R, exchange.store(f"file://{tmp_path}", 0, R, "run"))
    with jax.numpy_dtype_promotion("standard"):
        [batch] = batches(1, R)
        state, _ = one.run(one.init(oracle.make_params()), [rows(batch, 0)])
        # Of a checkpoint: it has encoded before.
        state = state.replace(codec=jax.tree.map(lambda x: x + 1, state.codec))
        _, *taken = one.carrier.given(state)
        state = rejoin.install(one.sync_loop(state), precompile(one, state), *taken)
    like = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in state.anchor.items()}
    [found], fresh = state.codec, codec.init(like)
    assert any(np.any(x) for x in jax.tree.leaves(fresh))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), found, fresh)
