"""Replace, blend and replay against the sentences they stand for."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm_jax.rules.landing import blend, replace, replay


def flight(seed=0):
    """Snapshot, local value now, new anchor."""
    rng = np.random.default_rng(seed)
    trees = [
        {"w": rng.standard_normal((3, 5)), "b": rng.standard_normal(7), "s": rng.standard_normal()}
        for _ in range(3)
    ]
    return [{k: np.asarray(v, np.float32) for k, v in tree.items()} for tree in trees]


def land(rule, snapshot, local, anchor, **extra):
    progress = {k: jnp.asarray(local[k] - snapshot[k]) for k in local}
    displacement = {k: jnp.asarray(anchor[k] - snapshot[k]) for k in local}
    anchor = {k: jnp.asarray(v) for k, v in anchor.items()}
    moved, _ = rule.update(
        progress, rule.init(anchor), anchor, displacement=displacement, staleness=3, **extra
    )
    return optax.apply_updates(anchor, moved)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_blend_weighs_the_local_value_with_alpha(alpha):
    snapshot, local, anchor = flight()
    landed = land(blend(alpha), snapshot, local, anchor, unknown=1)
    for name in local:
        expected = alpha * local[name] + (1 - alpha) * anchor[name]
        np.testing.assert_allclose(landed[name], expected, rtol=1e-5, atol=1e-6)


def test_replace_lands_on_the_anchor_exactly():
    snapshot, local, anchor = flight()
    landed = land(replace(), snapshot, local, anchor, unknown=1)
    for name in local:
        assert np.array_equal(landed[name], anchor[name])


def test_replay_puts_the_progress_on_the_anchor():
    snapshot, local, anchor = flight()
    landed = land(replay(), snapshot, local, anchor, unknown=1)
    for name in local:
        assert np.array_equal(landed[name], anchor[name] + (local[name] - snapshot[name]))


def test_narrow_progress_lands_on_an_fp32_anchor():
    rule = blend(0.3)
    anchor = jnp.zeros(3)
    moved, _ = rule.update(
        jnp.full(3, 1 / 3, jnp.bfloat16), rule.init(anchor), anchor, displacement=jnp.ones(3)
    )
    assert moved.dtype == jnp.float32
    np.testing.assert_allclose(moved, 0.3 * (np.float32(jnp.bfloat16(1 / 3)) - 1), rtol=1e-6)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_blend_refuses_a_weight_outside_the_unit_interval(alpha):
    with pytest.raises(ValueError, match="alpha"):
        blend(alpha)
