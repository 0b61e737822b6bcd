"""Attention kernels on every device's own samples and heads."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowcomm_jax as lc
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.models import attention, preset
from lowcomm_jax.models.attention import kernel_for, masked_attention, on_shards


def operands(heads=4, kv_heads=4, length=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 3)
    counts = (heads, kv_heads, kv_heads)
    return [jax.random.normal(k, (4, n, length, 8), dtype) for k, n in zip(keys, counts)]


def gradients(attend, *qkv):
    def loss(*qkv):
        mixed = attend(*qkv)
        return jnp.sum(jnp.sin(mixed.astype(jnp.float32))), mixed

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*qkv)


@pytest.mark.parametrize("fsdp, tensor, kv_heads", [(4, 1, 4), (2, 2, 2), (1, 4, 2)])
def test_a_kernel_on_shards_equals_the_whole(fsdp, tensor, kv_heads):
    """Heads that do not divide over `tensor` (2 over 4) stay whole."""
    qkv = operands(kv_heads=kv_heads)
    regions = Regions(2, lc.make_mesh(2, fsdp=fsdp, tensor=tensor))
    lifted = regions.lift(functools.partial(gradients, on_shards(masked_attention)), (0, 0, 0))
    both = [jnp.stack([x, x]) for x in qkv]
    found = jax.tree.map(lambda x: x[1], jax.jit(lifted)(*both))
    expected = gradients(masked_attention, *qkv)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-6, 2e-5), found, expected)


def test_the_forward_pass_of_a_kernel_runs_once():
    """What it keeps goes to the backward pass as it lies."""
    runs = []

    def counted(q, k, v):
        runs.append(1)
        return masked_attention(q, k, v)

    regions = Regions(2, lc.make_mesh(2, fsdp=4))
    lifted = regions.lift(functools.partial(gradients, on_shards(counted)), (0, 0, 0))
    jax.eval_shape(lifted, *[jnp.stack([x, x]) for x in operands()])
    assert len(runs) == 1


def test_the_tpu_kernel_equals_the_plain_one():
    keys = jax.random.split(jax.random.key(2), 3)
    qkv = [jax.random.normal(k, (1, n, 128, 64)) for k, n in zip(keys, (4, 2, 2))]
    found = gradients(functools.partial(attention._splash, interpret=True), *qkv)
    expected = gradients(masked_attention, *qkv)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-6, 3e-5), found, expected)


def test_lengths_that_the_tpu_kernel_cannot_take_use_the_plain_one():
    qkv = operands(length=16)
    np.testing.assert_array_equal(attention.splash_attention(*qkv), masked_attention(*qkv))


@pytest.mark.parametrize(
    "device, changes, kernel",
    [
        ({"platform": "cpu"}, {}, "xla"),
        ({"platform": "gpu", "compute_capability": "9.0"}, {}, "cudnn"),
        ({"platform": "gpu", "compute_capability": "10.0"}, {}, "cudnn"),
        ({"platform": "gpu", "compute_capability": "7.0"}, {}, "xla"),
        ({"platform": "gpu", "compute_capability": "9.0"}, {"head_dim": 256}, "xla"),
        ({"platform": "gpu", "compute_capability": "9.0"}, {"compute_dtype": "float32"}, "xla"),
        ({"platform": "gpu", "compute_capability": "gfx942"}, {}, "xla"),
        ({"platform": "rocm"}, {}, "xla"),
        ({"platform": "tpu"}, {}, "splash"),
        ({"platform": "tpu"}, {"head_dim": 32}, "xla"),
    ],
)
def test_auto_takes_what_the_device_has(device, changes, kernel):
    config = preset("diloco_150m", **{"compute_dtype": "bfloat16", **changes})
    assert kernel_for(config, types.SimpleNamespace(**device)) == kernel
