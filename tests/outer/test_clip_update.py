"""Clipping of the outer update by its global norm."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm_jax.outer import clip_update, nesterov


def test_long_updates_are_shortened_and_short_ones_left_alone():
    update = {"a": np.float32([[3.0, -1.0, 2.0]]), "b": np.float32(4.0)}
    norm = np.sqrt(9 + 1 + 4 + 16)
    rule = clip_update(2.5)
    clipped, _ = rule.update(update, rule.init(update))
    np.testing.assert_allclose(clipped["a"], update["a"] * 2.5 / norm, rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], 4.0 * 2.5 / norm, rtol=1e-6)
    rule = clip_update(6.0)
    kept, _ = rule.update(update, rule.init(update))
    assert np.array_equal(kept["a"], update["a"])
    assert np.array_equal(kept["b"], update["b"])


def test_the_rule_before_it_keeps_its_unclipped_momentum():
    clipped = optax.chain(nesterov(0.5, 0.8), clip_update(0.1))
    state = clipped.init(jnp.zeros(3))
    _, state = clipped.update(jnp.full(3, 7.0), state)
    np.testing.assert_allclose(optax.tree.get(state, "trace"), np.full(3, 7.0))


def test_a_zero_update_stays_zero():
    rule = clip_update(1.0)
    np.testing.assert_array_equal(
        rule.update(jnp.zeros(3), rule.init(jnp.zeros(3)))[0], np.zeros(3)
    )


def test_refusal():
    with pytest.raises(ValueError, match="max_norm=0"):
        clip_update(0)
