"""Checks the forward pass, the loss and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads
from models import llama_oracle
from models.sizes import SIZES

from lowcomm_jax.models import TransformerConfig, build
from lowcomm_jax.models.attention import masked_attention, rope_tables, rotate, wide_einsum
from lowcomm_jax.models.loss import masked_cross_entropy, scores
from lowcomm_jax.models.transformer import RMSNorm
from lowcomm_jax.models.weights import stack_layers, unstack_layers

RNG = jax.random.key(0)


def tiny(**changes):
    fields = {**SIZES, "max_seq_len": 32, "init_std": 0.3, "layer_loop": "unrolled", **changes}
    return build(TransformerConfig(**fields))


def tokens(batch=3, length=12, seed=1):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 37)


def init(model, seed=0):
    return jax.jit(model.init)(jax.random.key(seed))


def loss_and_grads(model, params, batch):
    return jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))(params, batch, RNG)


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_rope_rotates_pairs_half_a_head_apart():
    x_TxE = jax.random.normal(RNG, (7, 10))
    rotated = rotate(x_TxE[None], rope_tables(jnp.arange(7), 10, 300.0))[0]
    np.testing.assert_allclose(
        rotated, llama_oracle.rotate_half(np.asarray(x_TxE, np.float64), 300.0), atol=1e-5
    )


def test_rope_scores_depend_on_the_distance_only():
    q, k = jax.random.normal(RNG, (2, 1, 8))

    def score(at_q, at_k):
        q_there = rotate(q[None], rope_tables(jnp.array([at_q]), 8, 50.0))
        return jnp.sum(q_there * rotate(k[None], rope_tables(jnp.array([at_k]), 8, 50.0)))

    np.testing.assert_allclose(score(9, 4), score(25, 20), rtol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (5, 1)])
def test_grouped_query_attention_equals_jax(heads, kv_heads):
    keys = jax.random.split(RNG, 3)
    q = jax.random.normal(keys[0], (2, heads, 9, 8))
    k, v = (jax.random.normal(key, (2, kv_heads, 9, 8)) for key in keys[1:])
    expected = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), is_causal=True)
    np.testing.assert_allclose(masked_attention(q, k, v), expected, atol=1e-6)


def test_rms_norm_is_computed_in_float32():
    norm = RMSNorm(50, 1e-6)
    x = 200.0 + jax.random.normal(RNG, (4, 50))
    low = x.astype(jnp.bfloat16)
    expected = llama_oracle.rms_norm(np.asarray(low, np.float64), 1.0, 1e-6)
    assert norm(low).dtype == jnp.bfloat16
    np.testing.assert_allclose(norm(low).astype(jnp.float32), expected, rtol=2**-8)
    assert norm(x).dtype == jnp.float32


@pytest.mark.parametrize(("loop", "mlp"), [("unrolled", "gelu"), ("scan", "swiglu")])
def test_future_tokens_do_not_influence(mlp, loop):
    model = tiny(mlp=mlp, layer_loop=loop, qk_norm=True)
    params = init(model)
    before = tokens()
    after = before.at[:, 7].set((before[:, 7] + 5) % 37)
    logits = jax.jit(model.logits)
    a, b = (np.asarray(logits(params, t)) for t in (before, after))
    np.testing.assert_array_equal(a[:, :7], b[:, :7])
    assert (np.abs(a[:, 7:] - b[:, 7:]).max(-1) > 1e-4).all()


def test_sequences_of_a_batch_do_not_mix():
    model = tiny()
    params, both = init(model), tokens(batch=2)
    logits = jax.jit(model.logits)
    np.testing.assert_allclose(logits(params, both)[1], logits(params, both[1:])[0], atol=1e-5)


def test_loss_against_numpy_with_mask_and_z_loss():
    model = tiny(z_loss=0.03)
    params, batch = init(model), tokens(batch=2, length=6)
    mask = np.array([[1, 1, 0, 0, 1], [0, 1, 0, 1, 1]], np.float32)
    loss, aux = jax.jit(model.loss_fn)(params, {"tokens": batch, "mask": jnp.asarray(mask)}, RNG)

    logits = np.asarray(jax.jit(model.logits)(params, batch[:, :-1]), np.float64)
    target = np.asarray(batch[:, 1:])
    partition = np.log(np.exp(logits).sum(-1))
    ce = partition - np.take_along_axis(logits, target[..., None], -1)[..., 0]
    mean = lambda x: (x * mask).sum() / 6  # noqa: E731
    np.testing.assert_allclose(aux["ce"], mean(ce), rtol=1e-5)
    np.testing.assert_allclose(loss, mean(ce) + 0.03 * mean(partition**2), rtol=1e-5)
    np.testing.assert_allclose(aux["accuracy"], mean(logits.argmax(-1) == target), rtol=1e-5)
    assert aux["tokens"] == 6
    assert loss.dtype == jnp.float32


@pytest.mark.parametrize("token", [37, -1, -100])
def test_a_token_outside_the_vocabulary_shows(token):
    """In the loss, and in no gradient of a row that is there."""
    model = tiny(layer_loop="scan")
    loss, _ = jax.jit(model.loss_fn)(init(model), {"tokens": tokens().at[1, 3].set(token)}, RNG)
    assert np.isnan(loss)


def test_loss_without_a_mask_counts_every_target():
    model = tiny()
    params, batch = init(model), {"tokens": tokens()}
    loss, aux = jax.jit(model.loss_fn)(params, batch, RNG)
    masked, _ = jax.jit(model.loss_fn)(params, {**batch, "mask": jnp.ones((3, 11))}, RNG)
    np.testing.assert_allclose(loss, masked, rtol=1e-6)
    assert aux["tokens"] == 33


def test_cross_entropy_is_stable_and_defined_without_targets():
    logits = jnp.array([[2e4, -2e4, 0.0], [3.0, 1.0, -1e4]])

    def masked(logits, mask, z_loss):
        return masked_cross_entropy(scores(logits, jnp.array([1, 0])), mask, z_loss)

    loss, aux = masked(logits, jnp.ones(2), 0.0)
    np.testing.assert_allclose(loss, (4e4 + np.log1p(np.exp(-2.0))) / 2, rtol=1e-6)
    assert aux["accuracy"] == 0.5
    grad = jax.grad(lambda x: masked(x, jnp.zeros(2), 0.3)[0])
    assert masked(logits, jnp.zeros(2), 0.3)[0] == 0
    np.testing.assert_array_equal(grad(logits), np.zeros((2, 3)))


def test_scan_and_unrolled_start_and_train_alike():
    unrolled, scanned = (tiny(layer_loop=loop, qk_norm=True) for loop in ("unrolled", "scan"))
    params, stacked = init(unrolled), init(scanned)
    assert_close(stack_layers(params), stacked, rtol=1e-6)
    assert stacked["blocks"]["attention"]["query"]["kernel"].shape == (2, 20, 48)
    assert params["blocks"][1]["attention"]["query"]["kernel"].shape == (20, 48)
    assert_close(unstack_layers(stack_layers(params)), params, rtol=0)

    batch = {"tokens": tokens()}
    (loss, _), grads = loss_and_grads(unrolled, params, batch)
    (other, _), other_grads = loss_and_grads(scanned, stack_layers(params), batch)
    np.testing.assert_allclose(loss, other, rtol=1e-6)
    assert_close(stack_layers(grads), other_grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loop", ["unrolled", "scan"])
def test_remat_recomputes_as_much_as_it_says(loop):
    batch = {"tokens": tokens()}

    def products(remat):
        model = tiny(layer_loop=loop, remat=remat)
        step = jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))
        shapes = jax.eval_shape(model.init, RNG)
        return step.lower(shapes, batch, RNG).as_text().count("dot_general")

    # A block has seven products with weights and two in attention.
    blocks = 2 if loop == "unrolled" else 1
    assert products("light") == products("none")
    assert products("full") - products("none") == 8 * blocks  # the last output is not needed


@pytest.mark.parametrize(
    ("loop", "changes"),
    [
        ("unrolled", {"remat": "full"}),
        ("unrolled", {"remat": "light", "qk_norm": True}),
        ("scan", {"remat": "light", "unroll": True, "mlp": "gelu"}),
        ("scan", {"loss_tiles": 4, "tie_embeddings": True}),
    ],
)
def test_what_saves_memory_or_time_does_not_change_gradients(loop, changes):
    shape = {k: x for k, x in changes.items() if k not in ("remat", "unroll", "loss_tiles")}
    plain, saving = tiny(layer_loop=loop, **shape), tiny(layer_loop=loop, **changes)
    params, batch = init(plain), {"tokens": tokens()}
    assert_close(
        loss_and_grads(plain, params, batch),
        loss_and_grads(saving, params, batch),
        rtol=1e-4,
        atol=1e-6,
    )


def test_bfloat16_compute_is_close_and_keeps_float32_parameters():
    batch = {"tokens": tokens()}
    exact, low = (
        tiny(init_std=0.1, layers=1, compute_dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    params = init(exact)
    (loss, _), grads = loss_and_grads(exact, params, batch)
    (other, aux), low_grads = loss_and_grads(low, params, batch)
    np.testing.assert_allclose(loss, other, rtol=5e-3)
    assert other != loss  # it did run in bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves((other, aux, low_grads))} == {
        jnp.dtype("float32")
    }
    distance = optax.tree.norm(jax.tree.map(jnp.subtract, grads, low_grads))
    assert distance < 0.05 * optax.tree.norm(grads)


def test_gradients_against_finite_differences():
    model = tiny(layers=1, qk_norm=True, tie_embeddings=True, z_loss=0.01, init_std=0.2)
    batch = {"tokens": tokens(batch=2, length=5)}
    check_grads(
        jax.jit(lambda p: model.loss_fn(p, batch, RNG)[0]),
        (init(model),),
        order=1,
        modes=["rev"],
        eps=1e-3,
        rtol=5e-3,
        atol=1e-3,
    )


def test_wide_einsum_accumulates_in_float32_and_differentiates():
    a = jax.random.normal(RNG, (5, 400)).astype(jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (3, 400)).astype(jnp.bfloat16)
    out, pull = jax.vjp(lambda a, b: wide_einsum("nd,vd->nv", a, b), a, b)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-4)
    cotangent = jnp.arange(15, dtype=jnp.float32).reshape(5, 3)
    grad_a, grad_b = pull(cotangent)
    assert grad_a.dtype == grad_b.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        grad_a.astype(jnp.float32), np.asarray(cotangent) @ np.asarray(b, np.float32), rtol=2**-7
    )
    np.testing.assert_allclose(
        grad_b.astype(jnp.float32),
        np.asarray(cotangent).T @ np.asarray(a, np.float32),
        rtol=2**-7,
        atol=1e-2,
    )


def test_vmap_and_map_over_replicas():
    model = tiny()
    params = jax.jit(jax.vmap(model.init))(jax.random.split(RNG, 3))
    batch = {"tokens": tokens(batch=6).reshape(3, 2, 12)}
    loss = jax.jit(lambda params, batch: model.loss_fn(params, batch, RNG)[0])
    one = [loss(*jax.tree.map(lambda x, i=i: x[i], (params, batch))) for i in range(3)]
    over = jax.jit(lambda *args: jax.lax.map(lambda x: loss(*x), args))
    np.testing.assert_allclose(jax.jit(jax.vmap(loss))(params, batch), one, rtol=1e-6)
    np.testing.assert_allclose(over(params, batch), one, rtol=1e-6)


def test_learns_a_sequence_that_repeats():
    model = tiny(init_std=0.1, layers=1)
    params = init(model)
    optimizer = optax.adam(1e-2)
    batch = {"tokens": jnp.tile(jnp.arange(13, dtype=jnp.int32) * 2, 2)[None]}

    @jax.jit
    def step(carry, _):
        params, state = carry
        (loss, _), grads = jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch, RNG)
        with jax.numpy_dtype_promotion("standard"):  # optax.adam raises a float to an int
            updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), loss

    _, losses = jax.lax.scan(step, (params, optimizer.init(params)), length=40)
    assert abs(losses[0] - np.log(37)) < 0.3
    assert losses[-1] < 0.1
