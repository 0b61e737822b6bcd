"""Eager updates: the mixed gradient, and the disagreement that must telescope."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.rules.outer import eager, sgd

RATE = 0.4


def run(inner_rule, deltas_TxRxM, weights_TxR):
    """Yield the anchors after each period and the contributions of that period."""
    rule = eager(inner_rule)
    _, regions, width = deltas_TxRxM.shape
    anchor_RxM = jnp.zeros((regions, width))
    state = jax.vmap(rule.init)(anchor_RxM)
    update = jax.jit(
        jax.vmap(
            lambda late, s, p, own, own_late, w, w_late: rule.update(
                late, s, p, own=own, own_late=own_late, weight=w, weight_late=w_late
            ),
            in_axes=(None, 0, 0, 0, 0, 0, 0),
        )
    )
    late_mean, own_late, weight_late = jnp.zeros(width), jnp.zeros_like(anchor_RxM), weights_TxR[0]
    for own, weight in zip(deltas_TxRxM, weights_TxR, strict=True):
        step, state = update(late_mean, state, anchor_RxM, own, own_late, weight, weight_late)
        anchor_RxM = anchor_RxM + step
        late_mean, own_late, weight_late = (weight[:, None] * own).sum(0), own, weight
        yield np.asarray(anchor_RxM, np.float64), np.asarray(weight[:, None] * own, np.float64)


def draw(periods, regions=3, width=7):
    rng = np.random.default_rng(5)
    return jnp.asarray(rng.standard_normal((periods, regions, width)), jnp.float32)


def test_disagreement_telescopes_with_weights_that_change():
    deltas = draw(60)
    rng = np.random.default_rng(6)
    raw = rng.uniform(0.2, 1.0, (60, 3))
    weights = jnp.asarray(raw / raw.sum(1, keepdims=True), jnp.float32)
    for anchor_RxM, part_RxM in run(sgd(RATE), deltas, weights):
        expected = -RATE * (part_RxM - part_RxM.mean(0))
        np.testing.assert_allclose(anchor_RxM - anchor_RxM.mean(0), expected, atol=2e-5)


def test_one_period_written_out():
    late_mean, own, own_late = jnp.array([2.0, -1.0]), jnp.array([4.0, 8.0]), jnp.array([1.0, 3.0])
    rule = eager(sgd(0.5))
    state = rule.init(own)
    same, _ = rule.update(late_mean, state, own=own, own_late=own_late, weight=0.3)
    np.testing.assert_allclose(
        same, -0.5 * np.array([2 + 0.3 * 4 - 0.3 * 1, -1 + 0.3 * 8 - 0.3 * 3]), rtol=1e-6
    )
    other, _ = rule.update(
        late_mean, state, own=own, own_late=own_late, weight=0.3, weight_late=jnp.float32(0.6)
    )
    np.testing.assert_allclose(
        other, -0.5 * np.array([2 + 0.3 * 4 - 0.6 * 1, -1 + 0.3 * 8 - 0.6 * 3]), rtol=1e-6
    )


def test_the_own_parts_are_required():
    rule = eager(sgd(0.5))
    with pytest.raises(TypeError, match="own"):
        rule.update(jnp.ones(2), rule.init(jnp.ones(2)), weight=0.3)
