"""How far regions are apart, and what their models are worth, by hand."""

import jax
import numpy as np
import oracle
import pytest
from oracle.jax_problem import loss_fn
from oracle_runs import started, stream

import lowcomm_jax as lc

R = 4


@pytest.fixture(scope="module")
def finished():
    with jax.numpy_dtype_promotion("standard"):
        engine, state = started(lc.methods.noloco(3), R)
        batches = stream(8, R)
        state, _ = engine.run(state, batches)
        return engine.finish(state), batches[0]


def test_variance_is_the_mean_square_distance_from_the_mean(finished):
    state, _ = finished
    flat = np.concatenate(
        [np.asarray(x, np.float64).reshape(R, -1) for x in state.anchor.values()], 1
    )
    expected = ((flat - flat.mean(axis=0)) ** 2).sum(axis=1).mean()
    assert expected > 1e-3
    assert float(lc.consensus.variance(state)) == pytest.approx(expected, rel=1e-5)


def test_judge_evaluates_every_region_and_their_average(finished):
    state, batch = finished
    x, y = batch["x"][0], batch["y"][0]
    found = lc.consensus.judge(state, lambda params: loss_fn(params, {"x": x, "y": y}, None))
    losses = [
        oracle.loss({k: np.asarray(v[r]) for k, v in state.anchor.items()}, x, y) for r in range(R)
    ]
    mean = {k: np.asarray(v).mean(axis=0) for k, v in state.anchor.items()}
    np.testing.assert_allclose(found.regions, losses, rtol=1e-5)
    assert found.average == pytest.approx(oracle.loss(mean, x, y), rel=1e-5)
    assert found.spread == pytest.approx(max(losses) - min(losses), rel=1e-3)


def test_contraction_is_the_geometric_mean_factor():
    assert lc.consensus.contraction([0.0, 0.0, 3.0, 0.5, 0.12]) == pytest.approx(0.2)
    assert lc.consensus.contraction([0.0, 1.0]) is None
    assert lc.consensus.contraction([2.0, 0.0]) is None
