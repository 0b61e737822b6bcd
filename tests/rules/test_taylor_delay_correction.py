"""Taylor delay correction: every mode against NumPy, units, guards and the weight-decay option."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm_jax.rules.landing import taylor_delay_correction

RATE, TAU = 4e-2, 3
SHAPES = {"blocks/w": (2, 3, 5), "blocks/gain": (2,), "head": (7,), "temperature": ()}


def as_float(count):
    return count.astype(jnp.float32)  # strict promotion does not mix int32 and float


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {k: np.asarray(scale * rng.standard_normal(s), np.float32) for k, s in SHAPES.items()}


def land(rule, u, d, anchor=None, tau=TAU, **extra):
    anchor = draw(9) if anchor is None else anchor
    u, d, anchor = (jax.tree.map(jnp.asarray, tree) for tree in (u, d, anchor))
    return jax.jit(rule.update)(
        u, rule.init(anchor), anchor, displacement=d, staleness=jnp.int32(tau), **extra
    )


def oracle(u, d, factor):
    """T = -tau (g + g f) with f = factor(name, g, D), in float64; and ||correction|| / ||g||."""
    moved, above, below = {}, 0.0, 0.0
    for name in u:
        g = -np.asarray(u[name], np.float64) / TAU
        f = factor(name, g, np.asarray(d[name], np.float64))
        moved[name] = -TAU * (g + g * f)
        above, below = above + np.sum((g * f) ** 2), below + np.sum(g**2)
    return moved, np.sqrt(above / below)


def check(actual, expected):
    moved, state = actual
    for name in SHAPES:
        np.testing.assert_allclose(moved[name], expected[0][name], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(
        optax.tree.get(state, "correction_ratio"), expected[1], rtol=2e-5, atol=1e-7
    )


def test_off_is_replay_exactly():
    u, d = draw(1), draw(2)
    moved, state = land(taylor_delay_correction(0.3, "off"), u, d)
    assert all(np.array_equal(moved[name], u[name]) for name in u)
    assert float(state.correction_ratio) == 0.0


def test_fixed():
    u, d = draw(1), draw(2)
    check(land(taylor_delay_correction(0.3), u, d), oracle(u, d, lambda _, g, x: 0.3 * g * x))


def test_gradient_units_convert_there_and_back():
    u, d = draw(1, 0.1), draw(2)

    def factor(_, g, x):
        gradient = g / RATE
        corrected = gradient + 0.3 * gradient * gradient * x
        return (RATE * corrected - g) / g

    rule = taylor_delay_correction(0.3, "gradient_units", learning_rate=RATE)
    check(land(rule, u, d), oracle(u, d, factor))


def test_gradient_units_use_the_mean_rate_of_the_flight():
    u, d = draw(1, 0.1), draw(2)
    # Optax hands the counts 4, 5, 6 to the three inner steps that end at step 7.
    mean = np.mean([0.01 * (1 + count) for count in (4, 5, 6)])
    rule = taylor_delay_correction(0.3, "gradient_units", lambda t: 0.01 * (1 + as_float(t)))
    scheduled = land(rule, u, d, step=jnp.int32(7))
    check(scheduled, oracle(u, d, lambda _, g, x: 0.3 / mean * g * x))


def norm_factor(g, d, axes=None):
    norm = lambda x: np.sqrt(np.sum(x * x, axis=axes, keepdims=axes is not None))  # noqa: E731
    return np.clip(0.9 * norm(g) / norm(g * g * d) * g * d, -1, 1)


def test_norm_per_tensor():
    u, d = draw(1, 1e-4), draw(2, 1e-3)
    expected = oracle(u, d, lambda _, g, x: norm_factor(g, x))
    check(land(taylor_delay_correction(0.9, "norm"), u, d), expected)


def test_norm_per_stacked_tensor():
    u, d = draw(1, 1e-4), draw(2, 1e-3)
    u["blocks/w"][1] *= 50  # so that a norm over both layers would show

    def factor(name, g, x):
        if name.startswith("blocks/"):
            return norm_factor(g, x, axes=tuple(range(1, g.ndim)))
        return norm_factor(g, x)

    rule = taylor_delay_correction(0.9, "norm", batch_axes=lambda p: int(p.startswith("blocks/")))
    check(land(rule, u, d), oracle(u, d, factor))


def test_norm_per_fragment():
    u, d = draw(1, 1e-4), draw(2, 1e-3)
    g64 = {k: -np.asarray(v, np.float64) / TAU for k, v in u.items()}
    above = np.sqrt(sum(np.sum(g**2) for g in g64.values()))
    below = np.sqrt(sum(np.sum((g * g * d[k]) ** 2) for k, g in g64.items()))
    expected = oracle(u, d, lambda _, g, x: np.clip(0.9 * above / below * g * x, -1, 1))
    check(land(taylor_delay_correction(0.9, "norm", scope="fragment"), u, d), expected)


@pytest.mark.parametrize("scope", ["tensor", "fragment"])
def test_norm_does_not_depend_on_units(scope):
    """A cap on lambda would fail here, and so would squares that underflow."""
    rule = taylor_delay_correction(0.9, "norm", scope=scope)
    _, plain = land(rule, draw(1), draw(2))
    _, small = land(rule, draw(1, 2.0**-40), draw(2, 2.0**-40))
    assert 0.1 < float(plain.correction_ratio) < 0.89  # some elements are clipped
    np.testing.assert_allclose(small.correction_ratio, plain.correction_ratio, rtol=1e-5)


def test_norm_never_turns_the_gradient_round():
    rng = np.random.default_rng(0)
    u = jnp.asarray(rng.standard_normal(999) ** 3, jnp.float32)
    d = jnp.asarray(rng.standard_normal(999) ** 5, jnp.float32)
    rule = taylor_delay_correction(40.0, "norm")
    moved, state = rule.update(u, rule.init(u), displacement=d, staleness=2)
    assert (np.asarray(moved * jnp.sign(u)) >= 0).all()
    assert (np.abs(moved) <= 2 * np.abs(u)).all()
    assert 0 < float(state.correction_ratio) <= 1


@pytest.mark.parametrize("mode", ["off", "fixed", "gradient_units", "norm"])
@pytest.mark.parametrize("scope", ["tensor", "fragment"])
def test_no_progress_no_displacement_and_no_flight_are_safe(mode, scope):
    rule = taylor_delay_correction(
        0.3, mode, learning_rate=lambda t: 0.0 * as_float(t), scope=scope
    )
    zero = {k: np.zeros_like(v) for k, v in draw(0).items()}
    for u, d, tau in [
        (zero, draw(1), 3),
        (draw(1), zero, 3),
        (zero, zero, 0),
        (draw(1), draw(2), 0),
    ]:
        moved, state = land(rule, u, d, tau=tau, step=jnp.int32(0))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((moved, state)))
        if u is zero:
            assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(moved))
            assert float(state.correction_ratio) == 0.0


def test_staleness_zero_counts_as_one():
    rule = taylor_delay_correction(0.3)
    zero, one = (land(rule, draw(1), draw(2), tau=tau)[0] for tau in (0, 1))
    assert all(np.array_equal(zero[name], one[name]) for name in zero)


def test_strength_as_tree_prefix_array_and_function():
    u, d = {"a": draw(1), "b": draw(2)}, {"a": draw(3), "b": draw(4)}
    per_layer = np.float32([0.2, 0.9])
    trees = {
        "prefix": {"a": 0.2, "b": 0.7},
        "function": lambda g, x: {"a": 0.2, "b": jax.tree.map(lambda y: 0.7 + 0 * y, g["b"])},
        "layers": {"a": {**dict.fromkeys(SHAPES, 0.2), "blocks/w": per_layer}, "b": 0.7},
    }
    for kind, strength in trees.items():
        rule = taylor_delay_correction(strength)
        moved, _ = rule.update(u, rule.init(u), displacement=d, staleness=TAU)
        for half, value in (("a", 0.2), ("b", 0.7)):
            for name in SHAPES:
                layered = kind == "layers" and half == "a" and name == "blocks/w"
                lam = per_layer[:, None, None] if layered else value
                expected = u[half][name] - lam / TAU * u[half][name] ** 2 * d[half][name]
                np.testing.assert_allclose(moved[half][name], expected, rtol=2e-5, atol=2e-6)


def adamw_flight(start, directions, rates, decay):
    """Decoupled decay with directions that do not depend on the parameters."""
    value = start.astype(np.float64)
    for direction, rate in zip(directions, rates, strict=True):
        value = value - rate * direction - rate * decay * value
    return value


@pytest.mark.parametrize("scheduled", [False, True])
def test_weight_decay_debias_replays_the_same_steps_from_the_anchor(scheduled):
    rng = np.random.default_rng(0)
    snapshot, anchor, *directions = rng.standard_normal((2 + TAU, 7))
    rates = [0.03 * (count + 1) for count in (4, 5, 6)] if scheduled else [0.03] * TAU
    decays = {"decayed": 0.7, "exempt": 0.0}
    u, expected = {}, {}
    for name, decay in decays.items():
        u[name] = np.float32(adamw_flight(snapshot, directions, rates, decay) - snapshot)
        expected[name] = adamw_flight(anchor, directions, rates, decay)
    rule = taylor_delay_correction(
        0.0,
        learning_rate=(lambda t: 0.03 * (1 + as_float(t))) if scheduled else 0.03,
        weight_decay=decays,
    )
    anchors = dict.fromkeys(decays, jnp.asarray(anchor, jnp.float32))
    d = dict.fromkeys(decays, jnp.asarray(anchor - snapshot, jnp.float32))
    moved, _ = rule.update(
        u, rule.init(anchors), anchors, displacement=d, staleness=jnp.int32(TAU), step=7
    )
    for name in decays:
        np.testing.assert_allclose(
            anchors[name] + moved[name], expected[name], rtol=1e-5, atol=1e-6
        )
    plain = taylor_delay_correction(0.0)
    left, _ = plain.update(u, plain.init(anchors), anchors, displacement=d, staleness=TAU)
    assert np.abs(anchors["decayed"] + left["decayed"] - expected["decayed"]).max() > 1e-2


@pytest.mark.parametrize("rate", [0.03, lambda t: 0.03 * (1 + as_float(t))], ids=["float", "ramp"])
def test_without_a_flight_nothing_decays(rate):
    u, d = draw(1), draw(2)
    rule = taylor_delay_correction(0.0, learning_rate=rate, weight_decay=0.7)
    moved, _ = land(rule, u, d, tau=0, step=jnp.int32(7))
    for name in u:
        np.testing.assert_array_equal(moved[name], u[name])


def test_weight_decay_is_taken_out_of_the_gradient_that_is_corrected():
    u, d, anchor = draw(1), draw(2), draw(3)
    rho = (1 - RATE * 0.6) ** TAU
    rule = taylor_delay_correction(0.3, learning_rate=RATE, weight_decay=0.6)
    moved, state = land(rule, u, d, anchor)
    above = below = 0.0
    for name in u:
        snapshot = np.float64(anchor[name]) - d[name]
        g = -(u[name] - (rho - 1) * snapshot) / TAU
        corrected = g + 0.3 * g * g * d[name]
        expected = rho * anchor[name] - TAU * corrected - anchor[name]
        np.testing.assert_allclose(moved[name], expected, rtol=1e-4, atol=1e-5)
        above, below = above + np.sum((corrected - g) ** 2), below + np.sum(g * g)
    np.testing.assert_allclose(state.correction_ratio, np.sqrt(above / below), rtol=1e-4)


def test_refusals():
    with pytest.raises(
        ValueError, match=r"(?s)strength=-1.*mode='x'.*scope='y'.*weight_decay needs"
    ):
        taylor_delay_correction(-1, "x", scope="y", weight_decay=0.1)
    with pytest.raises(ValueError, match=r"gradient_units.*learning_rate"):
        taylor_delay_correction(0.5, "gradient_units")
    u = d = draw(1)
    with pytest.raises(ValueError, match="step="):
        land(taylor_delay_correction(0.5, "gradient_units", lambda count: 0.1), u, d)
    with pytest.raises(ValueError, match="params"):
        rule = taylor_delay_correction(0.5, learning_rate=0.1, weight_decay=0.1)
        rule.update(u, rule.init(u), displacement=d, staleness=1)
    with pytest.raises(ValueError, match="batch_axes=1 for leaf 'temperature'"):
        land(taylor_delay_correction(0.5, "norm", batch_axes=1), u, d)
