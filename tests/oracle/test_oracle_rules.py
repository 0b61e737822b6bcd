"""Delayed Nesterov, dynamic local updates, and the sign and size of the Taylor term."""

import math

import numpy as np
import pytest

from oracle import (
    AdamW,
    DelayedNesterovServer,
    Nesterov,
    flatten,
    make_batches,
    make_params,
    run_async_local_sgd,
    run_diloco,
    taylor_landing,
)

F64 = np.float64


def problem(steps=21):
    return make_params(0, F64), make_batches(0, steps=steps, regions=3, dtype=F64)


@pytest.mark.parametrize("regions", [1, 3, 4])
def test_simultaneous_arrivals_equal_one_nesterov_step(regions):
    params = make_params(8, F64)
    server = DelayedNesterovServer(params, lr=0.4, momentum=0.8, buffer=regions)
    anchor, momentum = params, {key: np.zeros_like(value) for key, value in params.items()}
    for round_ in range(3):
        gs = [make_params(30 + 7 * round_ + r, F64) for r in range(regions)]
        for g in gs:
            server.arrive(g)
        mean = {key: sum(g[key] for g in gs) / regions for key in params}
        anchor, momentum = Nesterov(0.4, 0.8).step(anchor, mean, momentum)
        np.testing.assert_allclose(flatten(server.theta), flatten(anchor), atol=1e-12)


def test_async_with_equal_speeds_is_diloco():
    params, batches = problem()
    one = run_async_local_sgd(
        params, batches, period=4, inner=AdamW(0.03), speeds=[2.0, 2.0, 2.0], lr=0.4, momentum=0.9
    )
    two = run_diloco(params, batches, period=4, inner=AdamW(0.03), outer=Nesterov(0.4, 0.9))
    for mine, theirs in zip(one.snapshots, two.snapshots, strict=True):
        pairs = [*zip(mine.anchors, theirs.anchors), *zip(mine.locals, theirs.locals)]
        for x, y in pairs:
            np.testing.assert_allclose(flatten(x), flatten(y), rtol=0, atol=1e-12)


def test_async_dylu_makes_slow_regions_take_fewer_steps():
    params, batches = problem(20)
    common = dict(period=10, inner=AdamW(0.03), lr=0.07, c=0.1)
    run = run_async_local_sgd(params, batches, speeds=[1.0, 0.6, 0.35], **common)
    assert [(e.step, e.regions, e.staleness) for e in run.of("land")] == [
        (9, (2,), 9), (10, (0,), 10), (10, (1,), 10), (18, (2,), 9), (20, (0,), 10), (20, (1,), 10),
    ]  # fmt: skip
    fixed = run_async_local_sgd(params, batches, speeds=[1.0, 0.6, 0.35], dynamic=False, **common)
    assert [(e.step, e.regions) for e in fixed.of("land")] == [(10, (0,)), (17, (1,)), (20, (0,))]


def test_taylor_landing_on_a_quadratic():
    """GD, tau = 5, eta h = 0.028, lambda_i = eta h_i / g_i^2 per element (DESIGN section 8)."""
    rng = np.random.default_rng(0)
    tau, rate = 5, 0.028
    snapshot = rng.standard_normal(400)
    anchor = snapshot + 0.4 * rng.standard_normal(400)

    def descend(theta):
        return theta * (1 - rate) ** tau

    local, ideal = descend(snapshot), descend(anchor)
    g = (snapshot - local) / tau
    errors = {}
    for name, lam in [("replay", 0.0), ("right", rate / g**2), ("wrong", -rate / g**2)]:
        landed = taylor_landing(lam)(anchor, local, snapshot, tau)
        errors[name] = np.linalg.norm(landed - ideal) / np.linalg.norm(anchor - snapshot)
    assert math.isclose(errors["replay"], 0.13, abs_tol=0.01)
    assert math.isclose(errors["right"], 0.01, abs_tol=0.005)
    assert math.isclose(errors["wrong"], 0.27, abs_tol=0.01)
