r"""The sign and the size of the Taylor term on a quadratic whose Hessian is known.

Gradient descent with $\eta h = 0.028$ and $\tau = 5$: the flight shrinks every coordinate by
$q = 0.972^5 = 0.868$. With $\lambda_i = \eta h_i / g_i^2$ the corrected gradient is the true one at
the new anchor, up to the change of the gradient within the flight. Relative to $|D|$ the errors are
$1 - q = 0.132$ for replay, $|1 - q - \tau \eta h| = 0.008$ with the right sign and
$1 - q + \tau \eta h = 0.272$ with the wrong one.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.rules.landing import replay, taylor_delay_correction

TAU, ETA_H, WIDTH = 5, 0.028, 11


def setting():
    rng = np.random.default_rng(0)
    eta = rng.uniform(1e-3, 1e-1, WIDTH)
    hessian = ETA_H / eta
    snapshot = rng.standard_normal(WIDTH)
    displacement = 0.4 * rng.standard_normal(WIDTH)
    return eta, hessian, snapshot, displacement


def descend(x, eta, hessian):
    for _ in range(TAU):
        x = x - eta * hessian * x
    return x


def relative_error(rule):
    eta, hessian, snapshot, displacement = setting()
    anchor = snapshot + displacement
    progress = descend(snapshot, eta, hessian) - snapshot
    moved, _ = rule.update(
        jnp.asarray(progress, jnp.float32),
        rule.init(jnp.asarray(anchor, jnp.float32)),
        jnp.asarray(anchor, jnp.float32),
        displacement=jnp.asarray(displacement, jnp.float32),
        staleness=TAU,
    )
    error = anchor + np.asarray(moved, np.float64) - descend(anchor, eta, hessian)
    return np.linalg.norm(error) / np.linalg.norm(displacement)


def exact_strength(sign=1.0):
    eta, hessian, snapshot, _ = setting()
    g = (snapshot - descend(snapshot, eta, hessian)) / TAU
    return jnp.asarray(sign * eta * hessian / g**2, jnp.float32)


def test_replay_leaves_what_the_flight_would_have_done_to_the_displacement():
    assert relative_error(replay()) == pytest.approx(1 - 0.972**5, abs=1e-5)
    assert relative_error(taylor_delay_correction(0.0)) == pytest.approx(0.132, abs=1e-3)


def test_the_right_sign_removes_it():
    rule = taylor_delay_correction(exact_strength())
    assert relative_error(rule) == pytest.approx(abs(1 - 0.972**5 - 5 * ETA_H), abs=1e-5)
    assert relative_error(rule) < 0.01


def test_the_wrong_sign_doubles_it():
    rule = taylor_delay_correction(exact_strength(-1.0))
    assert relative_error(rule) == pytest.approx(0.272, abs=1e-3)


def test_strength_as_a_function_of_the_gradient_says_the_same():
    rule = taylor_delay_correction(lambda g, displacement: ETA_H / g**2)
    assert relative_error(rule) == pytest.approx(0.0077, abs=1e-3)


def test_gradient_units_take_the_strength_that_does_not_know_the_rate():
    """lambda_i = h_i / gradient_i^2, with one learning rate for all coordinates."""
    _, _, snapshot, displacement = setting()
    eta = 0.01
    hessian = np.full(WIDTH, ETA_H / eta)
    anchor = snapshot + displacement
    progress = descend(snapshot, eta, hessian) - snapshot
    gradient = -progress / TAU / eta
    rule = taylor_delay_correction(
        jnp.asarray(hessian / gradient**2, jnp.float32), "gradient_units", learning_rate=eta
    )
    moved, _ = rule.update(
        jnp.asarray(progress, jnp.float32),
        rule.init(jnp.zeros(WIDTH)),
        displacement=jnp.asarray(displacement, jnp.float32),
        staleness=TAU,
    )
    error = anchor + np.asarray(moved, np.float64) - descend(anchor, eta, hessian)
    assert np.linalg.norm(error) / np.linalg.norm(displacement) == pytest.approx(0.0077, abs=1e-3)
