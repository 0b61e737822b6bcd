"""A large fragment, coded by layer and with Delta computed twice, gives what a small one does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax.compression import error_feedback, make, placement
from lowcomm_jax.compression.leaf import in_units
from lowcomm_jax.sync import round_functions

REGIONS, LAYERS = 3, 4


def loss(params, batch, rng):
    del rng
    x = batch["x"]
    for layer in range(LAYERS):
        x = jnp.tanh(x @ params["blocks"]["w"][layer])
    return jnp.mean((x - batch["y"]) ** 2)


def trained(codec):
    """Anchors after every step; in round 2 a region is away, in round 3 another has a NaN."""
    rng = np.random.default_rng(0)
    params = {"blocks": {"w": rng.standard_normal((LAYERS, 8, 8)).astype("f4") / 3}}
    method = lc.methods.diloco(2, codec=error_feedback(codec, 0.9))
    engine = lc.Engine(
        loss,
        optax.sgd(0.1),
        method,
        REGIONS,
        mesh=lc.make_mesh(region=1),
        stacked=("blocks",),
        skip_nonfinite=False,
    )
    state, anchors = engine.init(params), []
    for step in range(10):
        batch = {k: rng.standard_normal((REGIONS, 4, 8)).astype("f4") for k in ("x", "y")}
        present = np.ones(REGIONS, bool)
        present[1] = step not in (2, 3)
        batch["x"][2] += np.nan if step == 4 else 0.0
        state, _ = engine.step(state, batch, present)
        anchors.append(np.asarray(lc.global_params(state)["blocks"]["w"]))
    return np.stack(anchors)


@pytest.mark.parametrize("name", ["int4", "low_rank", "bf16_gate"])
def test_a_large_fragment_trains_as_a_small_one(name, monkeypatch):
    settings = {"rank": 2, "least": 1.0} if name == "low_rank" else {}
    codec = make(name, stacked=("blocks",), reduce="all_gather", **settings)
    small = trained(codec)
    assert np.isfinite(small).all() and np.ptp(small[:, 0, 0, 0]) > 0
    seen = []
    monkeypatch.setattr(placement, "LARGEST", 1)
    monkeypatch.setattr(round_functions, "LARGEST", 1)
    decode = type(in_units(codec.default)).decode

    def noted(self, payload, place):
        seen.append(len(jax.tree.leaves(payload)[0]))
        return decode(self, payload, place)

    monkeypatch.setattr(type(in_units(codec.default)), "decode", noted)
    np.testing.assert_allclose(trained(codec), small, atol=1e-5)
    assert 1 in seen, "layers are coded one after the other"
