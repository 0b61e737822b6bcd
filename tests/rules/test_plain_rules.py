"""The plain outer rules against NumPy, over several rounds with different pseudo-gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm_jax.rules.outer import average, heavy_ball, nesterov, sgd

SHAPES = {"w": (3, 5), "b": (7,), "scale": ()}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {k: np.asarray(rng.standard_normal(s), np.float32) for k, s in SHAPES.items()}


def run(rule, rounds=4):
    anchor = jax.tree.map(jnp.asarray, draw(0))
    state = rule.init(anchor)
    for t in range(rounds):
        delta = jax.tree.map(jnp.asarray, draw(10 + t))
        updates, state = rule.update(delta, state, anchor, round=t)
        anchor = optax.apply_updates(anchor, updates)
    return anchor


def oracle(step, rounds=4):
    """Step each leaf: step(round, momentum, delta) -> (momentum, change)."""
    result = {}
    for name in SHAPES:
        value = np.asarray(draw(0)[name], np.float64)
        momentum = np.zeros_like(value)
        for t in range(rounds):
            momentum, change = step(t, momentum, np.asarray(draw(10 + t)[name], np.float64))
            value = value + change
        result[name] = value
    return result


def assert_close(actual, expected):
    for name in SHAPES:
        np.testing.assert_allclose(actual[name], expected[name], rtol=2e-6, atol=2e-6)


def test_nesterov():
    def step(_, v, d):
        v = 0.6 * v + d
        return v, -0.3 * (d + 0.6 * v)

    assert_close(run(nesterov(0.3, 0.6)), oracle(step))


def test_nesterov_defaults_and_first_step():
    rule = nesterov()
    update, _ = rule.update(jnp.float32(2.0), rule.init(jnp.float32(0.0)))
    np.testing.assert_allclose(update, -(1 + 0.9) * 0.7 * 2.0, rtol=1e-6)


def test_nesterov_is_optax_sgd_bit_for_bit():
    ours, theirs = nesterov(0.4, 0.9), optax.sgd(0.4, momentum=0.9, nesterov=True)
    params = jax.tree.map(jnp.asarray, draw(0))
    state_a, state_b = ours.init(params), theirs.init(params)
    assert jax.tree.structure(state_a) == jax.tree.structure(state_b)
    for t in range(3):
        delta = jax.tree.map(jnp.asarray, draw(t))
        a, state_a = ours.update(delta, state_a, params)
        b, state_b = theirs.update(delta, state_b, params)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def test_a_schedule_counts_outer_rounds():
    def step(t, v, d):
        return v, -(0.5, 0.2, 0.1, 0.05)[t] * d

    rates = jnp.array([0.5, 0.2, 0.1, 0.05])
    assert_close(run(sgd(lambda count: rates[count])), oracle(step))


def test_heavy_ball():
    def step(_, v, d):
        v = 0.7 * v + d
        return v, -0.3 * v

    assert_close(run(heavy_ball(0.3, 0.7)), oracle(step))


def test_average_lands_on_the_mean_of_three_regions():
    anchor = np.asarray(draw(0)["w"])
    regions_RxMxN = np.stack([draw(s)["w"] for s in (1, 2, 3)])
    mean_delta = np.mean(anchor[None] - regions_RxMxN, axis=0)
    rule = average()
    update, _ = rule.update(jnp.asarray(mean_delta), rule.init(jnp.asarray(anchor)))
    np.testing.assert_allclose(anchor + update, regions_RxMxN.mean(0), rtol=1e-5, atol=1e-6)


def test_a_narrow_pseudo_gradient_meets_fp32_momentum_and_anchor():
    rule = nesterov(0.3, 0.6)
    anchor = jnp.zeros(4, jnp.float32)
    state = rule.init(anchor.astype(jnp.bfloat16))
    assert optax.tree.get(state, "trace").dtype == jnp.float32
    delta = jnp.full(4, 1 / 3, jnp.bfloat16)
    update, _ = rule.update(delta, state, anchor)
    assert update.dtype == jnp.float32
    np.testing.assert_allclose(update, -0.3 * 1.6 * np.asarray(delta, np.float32), rtol=1e-6)


def test_hyperparameters_may_be_injected():
    rule = optax.inject_hyperparams(nesterov)(learning_rate=0.3, momentum=0.6)
    state = rule.init(jnp.zeros(3))
    update, _ = rule.update(jnp.ones(3), state, jnp.zeros(3))
    np.testing.assert_allclose(update, -0.3 * 1.6 * np.ones(3), rtol=1e-6)


def test_every_violation_is_in_one_message():
    with pytest.raises(ValueError, match=r"(?s)learning_rate=-1.*momentum=1\.0"):
        nesterov(-1, 1.0)
    with pytest.raises(ValueError, match=r"(?s)learning_rate=-0\.5.*momentum=-0\.1"):
        heavy_ball(-0.5, -0.1)
    with pytest.raises(ValueError, match="learning_rate"):
        sgd(float("nan"))
