"""A Taylor rule given as a section: rows of a layer stack are tensors of their own."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.train.methods import make_method


def landed(stacked, taylor):
    method, problems = make_method(
        {"name": "cocodc", "period": 9, "fragments": 2, "overlap": 3, "taylor": taylor}, stacked
    )
    assert not problems
    u = jnp.array([[0.3, -0.1], [7.0, 2.0]])
    d = jnp.array([[0.2, 0.5], [-0.4, 0.9]])
    progress, displacement = {"blocks/w": u}, {"blocks/w": d}
    moved, _ = method.landing.update(
        progress, method.landing.init(progress), displacement=displacement, staleness=3
    )
    return np.asarray(moved["blocks/w"])


def expected(rows):
    u = np.array([[0.3, -0.1], [7.0, 2.0]])
    d = np.array([[0.2, 0.5], [-0.4, 0.9]])
    out = np.zeros_like(u)
    for part in rows:
        g = -u[part] / 3
        strength = 0.2 * np.linalg.norm(g) / np.linalg.norm(g * g * d[part])
        out[part] = u[part] * (1 + np.clip(strength * g * d[part], -1, 1))
    return out


@pytest.mark.parametrize(
    "stacked, rows", [((), [slice(None)]), (("blocks",), [slice(0, 1), slice(1, 2)])]
)
def test_norm_mode(stacked, rows):
    found = landed(stacked, {"mode": "norm", "strength": 0.2})
    np.testing.assert_allclose(found, expected(rows), rtol=2e-6)


def test_a_wrong_setting_is_reported():
    fields = {"name": "cocodc", "period": 9, "fragments": 2, "overlap": 3}
    _, problems = make_method({**fields, "taylor": {"mode": "norms"}}, ("blocks",))
    assert len(problems) == 1 and "method.taylor: " in problems[0]
