"""How large the Taylor term is at the sizes of an AdamW run: the figures of the docstring."""

import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.rules.landing import taylor_delay_correction

RATE, TAU, COUNT = 4e-4, 5, 1 << 20


@pytest.mark.parametrize(
    ("mode", "ratio", "changed"),
    [("fixed", 5.2e-7, 0.17), ("gradient_units", 1.3e-3, 0.96), ("norm", 0.45, 0.998)],
)
def test_size_of_the_term(mode, ratio, changed):
    rng = np.random.default_rng(0)
    anchor, progress, displacement = (
        jnp.asarray(scale * rng.standard_normal(COUNT), jnp.float32)
        for scale in (0.02, TAU * 0.3 * RATE, 5e-3)
    )
    rule = taylor_delay_correction(0.5, mode, learning_rate=RATE)
    moved, state = rule.update(
        progress, rule.init(anchor), anchor, displacement=displacement, staleness=TAU
    )
    assert float(state.correction_ratio) == pytest.approx(ratio, rel=0.03)
    replayed, landed = np.asarray(anchor + progress), np.asarray(anchor + moved)
    assert np.mean(landed != replayed) == pytest.approx(changed, abs=0.01)
    if mode == "fixed":
        change = np.sqrt(np.mean(np.square(np.float64(landed) - np.float64(replayed))))
        assert change == pytest.approx(4.8e-10, rel=0.05)
        assert change < 0.3 * np.spacing(np.float32(0.02))
