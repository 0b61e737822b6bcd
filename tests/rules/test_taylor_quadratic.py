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
LEFT = 1 - 0.972**5  # what the flight would have done to the displacement
DRAW = np.random.default_rng(0)
RATES, ONE_RATE = DRAW.uniform(1e-3, 1e-1, WIDTH), np.full(WIDTH, 0.01)
SNAPSHOT, DISPLACEMENT = DRAW.standard_normal(WIDTH), 0.4 * DRAW.standard_normal(WIDTH)


def descend(x, rates):
    for _ in range(TAU):
        x = x - rates * (ETA_H / rates) * x
    return x


def strength(sign, rates=RATES, units=1.0):
    """lambda_i = eta h_i / g_i^2, of gradients in these units."""
    g = (SNAPSHOT - descend(SNAPSHOT, rates)) / TAU / units
    return jnp.asarray(sign * ETA_H / units / g**2, jnp.float32)


@pytest.mark.parametrize(
    "rule, rates, expected",
    [
        pytest.param(replay(), RATES, LEFT, id="replay"),
        pytest.param(taylor_delay_correction(0.0), RATES, LEFT, id="no strength"),
        pytest.param(
            taylor_delay_correction(strength(1.0)), RATES, abs(LEFT - TAU * ETA_H), id="right sign"
        ),
        pytest.param(
            taylor_delay_correction(strength(-1.0)), RATES, LEFT + TAU * ETA_H, id="wrong sign"
        ),
        pytest.param(
            taylor_delay_correction(lambda g, displacement: ETA_H / g**2),
            RATES,
            abs(LEFT - TAU * ETA_H),
            id="a function of the gradient",
        ),
        pytest.param(  # lambda_i = h_i / gradient_i^2, with one learning rate for all coordinates
            taylor_delay_correction(
                strength(1.0, ONE_RATE, 0.01), "gradient_units", learning_rate=0.01
            ),
            ONE_RATE,
            abs(LEFT - TAU * ETA_H),
            id="gradient units",
        ),
    ],
)
def test_error_of_a_landing_relative_to_the_displacement(rule, rates, expected):
    anchor = SNAPSHOT + DISPLACEMENT
    progress = descend(SNAPSHOT, rates) - SNAPSHOT
    moved, _ = rule.update(
        jnp.asarray(progress, jnp.float32),
        rule.init(jnp.asarray(anchor, jnp.float32)),
        jnp.asarray(anchor, jnp.float32),
        displacement=jnp.asarray(DISPLACEMENT, jnp.float32),
        staleness=TAU,
    )
    error = anchor + np.asarray(moved, np.float64) - descend(anchor, rates)
    relative = np.linalg.norm(error) / np.linalg.norm(DISPLACEMENT)
    assert relative == pytest.approx(expected, abs=1e-5)
