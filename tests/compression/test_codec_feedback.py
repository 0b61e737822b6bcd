"""Error feedback, EF21 and the Optax view."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from codec_cases import build, compiled, tree

from lowcomm_jax.compression import (
    compress,
    decoupled_momentum,
    ef21,
    error_feedback,
    integrate,
    make,
)

LOSSY = ["int4", "stat2", "e3m0", "topk_stat2", "random_k", "dct_topk", "sign", "low_rank_int4"]


@pytest.mark.parametrize("name", LOSSY)
def test_nothing_is_lost_with_decay_1(name):
    """Sum of what was sent + residual == sum of pseudo-gradients."""
    codec = error_feedback(build(name))
    like = tree()
    encode, decode = jax.jit(codec.encode), compiled(name).decode
    state = codec.init(like)
    sent, total = ({k: np.zeros_like(v) for k, v in like.items()} for _ in range(2))
    for seed in range(4):
        x = tree(seed)
        payload, state = encode(x, state)
        y = decode(payload)
        sent = {k: sent[k] + np.asarray(y[k]) for k in x}
        total = {k: total[k] + x[k] for k in x}
    for key in like:
        np.testing.assert_allclose(
            sent[key] + np.asarray(state.residual[key]), total[key], atol=3e-5, err_msg=key
        )
    assert any(np.any(e) for e in state.residual.values())


@pytest.mark.parametrize("name", ["int4", "topk_stat2"])
def test_the_residual_is_what_receivers_miss(name):
    codec = error_feedback(build(name), decay=0.7)
    x = tree(3)
    encode = jax.jit(codec.encode)
    _, state = encode(x, codec.init(x))
    payload, after = encode(x, state)
    received = compiled(name).decode(payload)
    for key in x:
        want = (x[key] + np.float32(0.7) * np.asarray(state.residual[key])) - np.asarray(
            received[key]
        )
        # The multiply-add may be one rounding or two; a scale fused differently would show more.
        np.testing.assert_allclose(after.residual[key], want, atol=5e-7, err_msg=key)


def test_decay_forgets():
    codec = error_feedback(build("topk", k=1), decay=0.3)
    x = {"w": np.array([[1.0, -4.0], [2.0, 0.5]], np.float32)}
    state = codec.init(x)
    for _ in range(2):
        payload, state = codec.encode(x, state)
    # Round 1 sends -4 and keeps 1, 2, 0.5; round 2 sends the largest of x + 0.3 e.
    np.testing.assert_allclose(codec.decode(payload, x)["w"], [[0, -4], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(state.residual["w"], [[1.3, 0], [2.6, 0.65]], rtol=1e-6)


def test_ef21_converges_to_a_constant_and_integrate_follows_it():
    codec = ef21(build("topk", k=9))
    x = tree(6)
    encode, decode = jax.jit(codec.encode), jax.jit(lambda p: codec.decode(p, x))
    state, rule = codec.init(x), integrate()
    running = rule.init(x)
    for _ in range(40):
        payload, state = encode(x, state)
        received, running = rule.update(decode(payload), running)
    for key in ("scalar", "bias", "layers/w", "heads"):
        np.testing.assert_allclose(received[key], state.copy[key], atol=1e-5)
    np.testing.assert_allclose(received["bias"], x["bias"], atol=1e-6)
    errors = np.abs(np.asarray(received["heads"]) - x["heads"])
    assert errors.mean() < 0.7 * np.abs(x["heads"]).mean()


def test_compress_returns_what_receivers_decode_and_chains():
    x = tree(2)
    rule = optax.chain(compress(build("int4")), optax.sgd(0.7, momentum=0.9, nesterov=True))
    updates, _ = jax.jit(rule.update)(x, rule.init(x), x)
    payload, _ = compiled("int4").encode(x, ())
    received = compiled("int4").decode(payload)
    for key in x:
        np.testing.assert_allclose(updates[key], -0.7 * 1.9 * received[key], rtol=1e-4, atol=1e-5)


def test_compress_keeps_dtypes_takes_extra_arguments_and_feeds_back():
    rule = compress(make("topk", k=1), error_feedback=1.0)
    x = jnp.array([1.0, -4.0, 2.0], jnp.bfloat16)
    state, seen = rule.init(x), 0.0
    for _ in range(3):
        update, state = rule.update(x, state, params=x, loss=1.0)
        assert update.dtype == jnp.bfloat16
        seen = seen + np.asarray(update, np.float32)
    np.testing.assert_allclose(seen + np.asarray(state.codec.residual), [3.0, -12.0, 6.0])


def test_what_rounding_to_bfloat16_loses_is_sent_later():
    """Sum of what was returned + residual == sum of updates, over many rounds."""
    rule = compress("int8", error_feedback=1.0)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(40), jnp.bfloat16)
    state, update = rule.init(x), jax.jit(rule.update)
    returned, total = np.zeros(40), np.zeros(40)
    for t in range(30):
        step = (x * (1 + 0.37 * t)).astype(jnp.bfloat16)
        total += np.asarray(step, np.float64)
        got, state = update(step, state)
        returned += np.asarray(got, np.float64)
    np.testing.assert_allclose(returned + np.asarray(state.codec.residual), total, atol=1e-4)


def test_a_codec_that_needs_the_mean_is_refused():
    codec = decoupled_momentum(build("dct_topk"))
    with pytest.raises(ValueError, match="never sees; use error_feedback"):
        compress(codec)


def test_a_feedback_that_cannot_work_is_refused():
    with pytest.raises(ValueError, match=r"decay=1\.2"):
        compress("int4", error_feedback=1.2)
    with pytest.raises(ValueError, match="'ef22': choose one of ef21"):
        compress("int4", error_feedback="ef22")


@pytest.mark.parametrize(
    "codec",
    [
        ef21(build("topk", k=9)),
        decoupled_momentum(build("topk", k=9), 0.9),
        error_feedback(build("topk", k=9), 0.9),
    ],
)
@pytest.mark.parametrize("around", [error_feedback, ef21, decoupled_momentum])
def test_a_memory_beside_one_of_the_codecs_own_is_refused(around, codec):
    """A residual of increments would grow without bound, a personal mean would be lost, and what
    two residuals keep would be added twice."""
    with pytest.raises(ValueError, match=f"codec {codec.name} keeps what it has not sent itself"):
        around(codec)
