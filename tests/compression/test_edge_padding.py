"""Rows that do not fill their last block are padded with what stands at their edge."""

import jax
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax import compression


@pytest.mark.parametrize("shape", [(7, 131), (1, 5), (3, 257), (1, 1000), (2, 66)])
def test_padding_widens_no_blocks_range(shape):
    """A block far from zero, filled up with zeros, would have 100 times the range and error."""
    rng = np.random.default_rng(0)
    tree = {"w": (100 + rng.uniform(0, 1, shape)).astype(np.float32)}
    codec = compression.make("int8_affine")
    payload, _ = codec.encode(tree, codec.init(tree))
    decoded = codec.decode(payload, tree)
    assert np.abs(np.asarray(decoded["w"]) - tree["w"]).max() <= 1.01 / 255


@pytest.mark.parametrize("fsdp", [1, 2, 4])
def test_padding_of_rows_that_lie_on_several_devices(fsdp):
    """The same through an engine: a gradient far from zero, one step, descent at rate 1."""

    def loss(params, batch, rng):
        return (params["w"] * batch["g"].mean(axis=0)).sum()

    rng = np.random.default_rng(0)
    g = (100 + rng.uniform(0, 1, (2, 4, 8, 131))).astype(np.float32)
    mesh = lc.make_mesh(region=2, fsdp=fsdp, devices=jax.devices()[: 2 * fsdp])
    method = lc.methods.diloco(1, outer=optax.sgd(1.0), codec="int8_affine")
    one = lc.Engine(loss, optax.sgd(1.0), method, 2, mesh=mesh)
    with jax.numpy_dtype_promotion("standard"):
        state = one.init({"w": np.zeros((8, 131), np.float32)})
        state, _ = one.step(state, {"g": g})
    moved = -np.asarray(lc.global_params(state)["w"])
    assert np.abs(moved - g.mean(axis=(0, 1))).max() <= 1.01 / 255
