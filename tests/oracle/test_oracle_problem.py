"""The building blocks against something else: finite differences, JAX, Optax, hand arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from oracle import (
    SIZE,
    AdamW,
    Average,
    HeavyBall,
    Momentum,
    Nesterov,
    Sgd,
    flatten,
    gradient,
    loss,
    make_batches,
    make_params,
    run_diloco,
    step_batch,
    unflatten,
)
from oracle.jax_problem import loss_fn


def test_flatten_round_trip_in_sorted_key_order():
    params = make_params(3)
    flat = flatten(params)
    assert flat.shape == (SIZE,)
    np.testing.assert_array_equal(flat[15:22], params["b"])
    for key, value in unflatten(flat, params).items():
        np.testing.assert_array_equal(value, params[key])


def test_gradient_matches_finite_differences():
    params = make_params(1, np.float64)
    batches = make_batches(1, steps=1, regions=1, dtype=np.float64)
    x, y = batches["x"][0, 0], batches["y"][0, 0]
    grads = flatten(gradient(params, x, y))
    flat = flatten(params)
    for i in range(SIZE):
        up, down = flat.copy(), flat.copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        slope = (loss(unflatten(up, params), x, y) - loss(unflatten(down, params), x, y)) / 2e-6
        assert abs(slope - grads[i]) < 1e-7


def test_jax_loss_and_gradient_agree():
    params = make_params(2)
    batch = step_batch(make_batches(2, steps=2, regions=3), 2)
    one = {key: jnp.asarray(value[1]) for key, value in batch.items()}
    tree = jax.tree.map(jnp.asarray, params)
    value, grads = jax.value_and_grad(loss_fn)(tree, one, jax.random.key(0))
    np.testing.assert_allclose(value, loss(params, batch["x"][1], batch["y"][1]), rtol=1e-5)
    expected = gradient(params, batch["x"][1], batch["y"][1])
    for key in expected:
        np.testing.assert_allclose(grads[key], expected[key], rtol=1e-4, atol=1e-6)


def test_batches_do_not_depend_on_how_many_are_asked_for():
    small = make_batches(4, steps=2, regions=1)
    large = make_batches(4, steps=5, regions=3)
    np.testing.assert_array_equal(small["x"], large["x"][:2, :1])
    np.testing.assert_array_equal(small["y"], large["y"][:2, :1])
    assert not np.allclose(large["x"][0, 0], large["x"][0, 1])


schedule = optax.linear_schedule(0.05, 0.01, transition_steps=4)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Sgd(0.05), optax.sgd(0.05)),
        (Sgd(schedule), optax.sgd(schedule)),
        (Momentum(0.05, 0.8), optax.sgd(0.05, momentum=0.8)),
        (AdamW(0.03), optax.adamw(0.03)),
        (
            AdamW(schedule, b1=0.8, b2=0.97, eps=1e-3, weight_decay=0.1),
            optax.adamw(schedule, b1=0.8, b2=0.97, eps=1e-3, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "sgd-schedule", "momentum", "adamw", "adamw-settings"],
)
def test_inner_optimizers_match_optax(ours, theirs):
    params = make_params(5)
    batches = make_batches(5, steps=6, regions=1)
    mine, state = params, ours.init(params)
    other = jax.tree.map(jnp.asarray, params)
    other_state = theirs.init(other)
    for t in range(6):
        grads = gradient(mine, batches["x"][t, 0], batches["y"][t, 0])
        mine, state = ours.step(mine, grads, state)
        # Optax's own bias correction (float ** int32 count) is not written for strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            updates, other_state = theirs.update(
                jax.tree.map(jnp.asarray, grads), other_state, other
            )
        other = optax.apply_updates(other, updates)
        for key in params:
            np.testing.assert_allclose(mine[key], other[key], rtol=2e-5, atol=1e-6)
            assert mine[key].dtype == np.float32
            assert mine[key].shape == params[key].shape


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Average(), optax.sgd(1.0)),
        (Nesterov(0.7, 0.8), optax.sgd(0.7, momentum=0.8, nesterov=True)),
        (HeavyBall(0.7, 0.8), optax.sgd(0.7, momentum=0.8)),
    ],
    ids=["average", "nesterov", "heavy-ball"],
)
def test_outer_rules_match_optax(ours, theirs):
    anchor = make_params(6)
    momentum = {key: np.zeros_like(value) for key, value in anchor.items()}
    other = jax.tree.map(jnp.asarray, anchor)
    state = theirs.init(other)
    for seed in range(3):
        delta = make_params(10 + seed)
        anchor, momentum = ours.step(anchor, delta, momentum)
        updates, state = theirs.update(jax.tree.map(jnp.asarray, delta), state, other)
        other = optax.apply_updates(other, updates)
        for key in anchor:
            np.testing.assert_allclose(anchor[key], other[key], rtol=1e-5, atol=1e-6)


def test_two_regions_by_hand_guard_the_sign():
    """One SGD step each, one Nesterov step on top: every number written out."""
    params = make_params(7, np.float64)
    batches = make_batches(7, steps=1, regions=2, dtype=np.float64)
    run = run_diloco(params, batches, period=1, inner=Sgd(0.1), outer=Nesterov(0.4, 0.9))
    g0 = gradient(params, batches["x"][0, 0], batches["y"][0, 0])
    g1 = gradient(params, batches["x"][0, 1], batches["y"][0, 1])
    for key in params:
        mean_progress = 0.5 * (0.1 * g0[key] + 0.1 * g1[key])
        expected = params[key] - 0.4 * 1.9 * mean_progress
        np.testing.assert_allclose(run.last.anchors[0][key], expected, atol=1e-12)
        np.testing.assert_allclose(run.last.momentum[0][key], mean_progress, atol=1e-12)
