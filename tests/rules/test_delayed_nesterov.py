"""Delayed Nesterov against the published listing written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.rules.outer import delayed_nesterov


def listing(theta, arrivals, rate, beta, n, c):
    """Run the listing with a host branch and a running counter."""
    m, buffer = np.zeros_like(theta), np.zeros_like(theta)
    for t, g in enumerate(arrivals):
        buffer = buffer + g
        if (t + 1) % n == 0:
            m = beta * m + buffer / n
            theta = theta - rate * ((1 - c * n + c) * beta * m + g / n)
            buffer = np.zeros_like(theta)
        else:
            theta = theta - rate * (c * beta * m + g / n)
    return theta


@pytest.mark.parametrize(("n", "c"), [(1, 0.0), (3, 0.0), (3, 0.2), (4, 0.25), (5, 0.07)])
def test_matches_the_listing_over_odd_windows(n, c):
    rng = np.random.default_rng(n)
    start = rng.standard_normal((3, 5))
    arrivals = rng.standard_normal((11, 3, 5))
    rule = delayed_nesterov(0.3, 0.8, n, c)
    theta = jnp.asarray(start, jnp.float32)
    state = rule.init(theta)
    update = jax.jit(rule.update)
    for t, g in enumerate(arrivals):
        step, state = update(jnp.asarray(g, jnp.float32), state, theta)
        theta = theta + step
        assert int(state.arrivals) == t + 1
        assert int(state.pending) == (t + 1) % n
    np.testing.assert_allclose(
        theta, listing(start, arrivals, 0.3, 0.8, n, c), rtol=1e-5, atol=1e-5
    )


def test_a_schedule_counts_arrivals():
    rates = jnp.array([1.0, 0.25])
    rule = delayed_nesterov(lambda count: rates[count], 0.0, 2)
    state = rule.init(jnp.zeros(()))
    first, state = rule.update(jnp.float32(1.0), state)
    second, _ = rule.update(jnp.float32(1.0), state)
    np.testing.assert_allclose([first, second], [-0.5, -0.125])


def test_every_violation_is_in_one_message():
    with pytest.raises(ValueError, match=r"(?s)learning_rate=-1.*momentum=2.*c=0\.5"):
        delayed_nesterov(-1, 2, 3, 0.5)
    with pytest.raises(ValueError, match="buffer=0"):
        delayed_nesterov(0.1, 0.9, 0)
    with pytest.raises(ValueError, match=r"buffer=1\.5: give a whole number"):
        delayed_nesterov(0.1, 0.9, 1.5)
