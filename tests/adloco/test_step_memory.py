"""The largest microbatch is found from the compiler's memory analysis, not by crashing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax.adloco.step_plan import device_bytes, find_cap, step_bytes

R, WIDTH, SAMPLE = 2, 64, 16


@pytest.fixture(autouse=True)
def standard_promotion():
    """In the place of conftest.py's: nothing here may promote dtypes unasked."""


def loss_fn(params, batch, rng):
    """Activations of 4 * 16 * 64 bytes a sample and layer."""
    x = batch["x"]
    for w in params["layers"]:
        x = jnp.tanh(jnp.einsum("bsw,wv->bsv", x, w))
    return jnp.mean(x**2)


def test_the_cap_is_the_largest_microbatch_whose_step_fits():
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    with jax.numpy_dtype_promotion("standard"):
        engine = lc.Engine(loss_fn, optax.adamw(0.1), lc.methods.diloco(4), R, mesh=mesh, block=2)
        layers = [jnp.zeros((WIDTH, WIDTH))] * 2
        state = engine.init({"layers": layers})
        batch = {"x": np.zeros((R, 1, SAMPLE, WIDTH), np.float32)}
        nbytes = functools.cache(lambda m: step_bytes(engine, state, batch, m))
        cap = find_cap(nbytes, budget=nbytes(8) + 1000, start=8, limit=64)
    assert cap == 8
    # State, which does not grow: fp32 parameters and moments of two regions, anchor and momentum.
    fixed = 4 * 2 * WIDTH**2 * (3 * R + 2)
    sample = 4 * SAMPLE * WIDTH
    assert nbytes(8) > fixed + 8 * sample * R * 2
    assert nbytes(16) - nbytes(8) >= 8 * sample * (2 * R + 2)  # staged, and two activations
    assert device_bytes((state.anchor, state.outer)) >= 4 * 2 * WIDTH**2 * 2
