"""Checks what only a GPU has: cuDNN attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.models import TransformerConfig, build

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
RNG = jax.random.key(0)


def test_cudnn_attention_equals_xla():
    fields = {
        "vocab_size": 512,
        "layers": 2,
        "width": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "mlp_width": 512,
        "compute_dtype": "bfloat16",
    }
    xla, cudnn = (build(TransformerConfig(**fields, attention=kind)) for kind in ("xla", "cudnn"))
    params = xla.init(RNG)
    batch = {"tokens": jax.random.randint(RNG, (4, 257), 0, 512)}
    (loss, _), grads = jax.jit(jax.value_and_grad(xla.loss_fn, has_aux=True))(params, batch, RNG)
    (other, _), other_grads = jax.jit(jax.value_and_grad(cudnn.loss_fn, has_aux=True))(
        params, batch, RNG
    )
    np.testing.assert_allclose(loss, other, rtol=2e-3)
    square = lambda tree: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))  # noqa: E731
    distance = square(jax.tree.map(jnp.subtract, grads, other_grads))
    assert distance < 0.05**2 * square(grads)


def test_lax_map_over_replicas_with_cudnn():
    config = TransformerConfig(
        vocab_size=128,
        layers=2,
        width=128,
        heads=2,
        kv_heads=2,
        head_dim=64,
        mlp_width=256,
        compute_dtype="bfloat16",
        attention="cudnn",
    )
    model = build(config)
    params = jax.vmap(model.init)(jax.random.split(RNG, 3))
    batch = {"tokens": jax.random.randint(RNG, (3, 2, 65), 0, 128)}
    step = lambda args: jax.grad(lambda p: model.loss_fn(p, args[1], RNG)[0])(args[0])  # noqa: E731
    got = jax.jit(lambda *args: jax.lax.map(step, args))(params, batch)
    for i in range(3):
        one = jax.jit(step)(jax.tree.map(lambda leaf, i=i: leaf[i], (params, batch)))
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=2e-2, atol=1e-4), got, one
        )
