"""One region's inner step: what goes on, and what stands still, when a step is skipped."""

import jax
import numpy as np
from params.tiny_runs import R, engine, scalars

import lowcomm_jax as lc
from lowcomm_jax.train.inner_step import step_key

BAD = 1


def noisy_loss(params, batch, rng):
    drawn = jax.random.uniform(rng)
    return (params["w"] * batch["x"]).mean() * (1 + drawn), {"drawn": drawn}


def test_a_skipped_step_uses_up_its_key_and_nothing_else():
    """Its key would be drawn again by the next step, and every later step be off by one."""
    table = np.arange(1.0, 1 + 4 * R).reshape(4, R)
    table[1, BAD] = np.nan
    one = engine(noisy_loss, lc.methods.diloco(10), seed=5)
    state = one.init({"w": np.float32(1.0)})
    drawn, values = [], []
    for batch in scalars(table):
        state, metrics = one.step(state, batch)
        drawn.append(np.asarray(metrics["drawn"]))
        values.append(np.asarray(state.inner.params["w"]))
    assert np.asarray(state.inner.step).tolist() == [4] * R
    keys = [[step_key(5, r, t) for r in range(R)] for t in range(4)]
    expected = [[float(jax.random.uniform(key)) for key in row] for row in keys]
    np.testing.assert_allclose(drawn, expected, rtol=1e-6)
    assert values[1][BAD] == values[0][BAD] and values[2][BAD] != values[1][BAD]
    assert np.asarray(state.inner.tokens)[:, 0].tolist() == [4, 3, 4]
