"""Batches stay cut over a region's devices: same loss and gradients, nothing of them gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowcomm_jax as lc
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.models import TransformerConfig, build

KEY = jax.random.key(0)


def on_mesh(loss_fn, params, batch, fsdp, tensor=1):
    """Loss, aux and gradients of two regions with these devices, of which both get the same."""
    mesh = lc.make_mesh(2, fsdp=fsdp, tensor=tensor)
    regions = Regions(2, mesh)

    def one(params, batch):
        return jax.value_and_grad(loss_fn, has_aux=True)(params, batch, KEY)

    twice = jax.tree.map(lambda x: jnp.stack([x, x]), (params, batch))
    cut = regions.sharding("region", "fsdp")
    given = twice[0], jax.device_put(twice[1], cut)
    return jax.tree.map(lambda x: x[1], jax.jit(regions.lift(one, (0, 0)))(*given))


def linear(params, batch, rng):
    """A mean over the tokens that count, of which the samples have different numbers."""
    del rng
    miss = (batch["x"] @ params["w"] + params["b"][None]) ** 2
    tokens = jnp.sum(batch["mask"])
    mean = jnp.sum(miss.sum(axis=1) * batch["mask"]) / jnp.maximum(tokens, 1.0)
    return mean, {"tokens": tokens, "twice": 2 * mean}


def rows():
    draw = np.random.default_rng(0)
    params = {"w": draw.standard_normal((8, 12)), "b": draw.standard_normal(3 * 4)}
    mask = np.array([1, 1, 0, 0, 1, 0, 0, 0], np.float32)  # the last two devices: one, none
    batch = {"x": draw.standard_normal((8, 8)), "mask": mask}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batch))


def close(one, other, rtol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), one, other)


@pytest.mark.parametrize("fsdp", [2, 4])
def test_a_sharded_loss_is_the_loss_of_the_whole_batch(fsdp):
    params, batch = rows()
    whole = jax.value_and_grad(linear, has_aux=True)(params, batch, KEY)
    close(on_mesh(lc.shard_batch_loss(linear), params, batch, fsdp), whole)


def test_new_values_of_buffers_are_those_of_the_whole_batch():
    """As many samples on every device: the mean over the devices is the mean over the batch."""

    def tracked(params, batch, rng):
        loss, aux = linear(params, batch, rng)
        return loss, {**aux, "updates": {"mean": 0.7 * params["b"][0] + 0.3 * batch["x"].mean()}}

    params, batch = rows()
    whole = jax.value_and_grad(tracked, has_aux=True)(params, batch, KEY)
    close(on_mesh(lc.shard_batch_loss(tracked), params, batch, 4), whole)


def test_without_several_devices_the_loss_function_itself_is_called():
    params, batch = rows()
    text = str(jax.make_jaxpr(lc.shard_batch_loss(linear))(params, batch, KEY))
    assert text == str(jax.make_jaxpr(linear)(params, batch, KEY))


def test_each_device_draws_from_a_key_of_its_own():
    def noisy(params, batch, rng):
        return jnp.sum(params["b"]) * 0 + jax.random.uniform(rng), {"n": batch["mask"].sum()}

    params, batch = rows()
    drawn = on_mesh(lc.shard_batch_loss(noisy), params, batch, 4)[0][0]
    own = [jax.random.uniform(jax.random.fold_in(KEY, i)) for i in range(4)]
    np.testing.assert_allclose(drawn, np.mean(own), rtol=1e-6)


@pytest.mark.parametrize(
    "fsdp, tensor",
    [
        (2, 2),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(1, 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_transformer_on_a_cut_batch_equals_one_device(fsdp, tensor, tied):
    config = TransformerConfig(
        vocab_size=64,
        layers=2,
        width=32,
        heads=4,
        kv_heads=4,
        head_dim=8,
        mlp_width=64,
        tie_embeddings=tied,
        layer_loop="scan",
    )
    model = build(config)
    params = model.init(KEY)
    batch = {"tokens": jax.random.randint(KEY, (4, 9), 0, 64)}
    whole = jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch, KEY)
    close(on_mesh(model.loss_fn, params, batch, fsdp, tensor), whole, rtol=1e-4)
