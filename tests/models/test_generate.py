"""Checks sampling: the cache changes nothing, the draws follow the tempered distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.sizes import SIZES

from lowcomm_jax.models import TransformerConfig, build
from lowcomm_jax.models.model import sample

RNG = jax.random.key(3)
PROMPT = jnp.array([5, 1, 30, 7], jnp.int32)


def model_and_params(loop, **changes):
    fields = {**SIZES, "max_seq_len": 16, "init_std": 0.5, "layer_loop": loop, **changes}
    model = build(TransformerConfig(**fields))
    return model, jax.jit(model.init)(RNG)


@pytest.mark.parametrize("loop", ["unrolled", "scan"])
def test_greedy_with_cache_equals_greedy_without(loop):
    model, params = model_and_params(loop, qk_norm=True)
    following = jax.jit(lambda tokens, at: jnp.argmax(model.logits(params, tokens[None])[0, at]))
    expected = np.zeros(13, np.int32)
    expected[:4] = PROMPT
    for at in range(3, 12):  # what stands after `at` cannot matter
        expected[at + 1] = following(expected, at)
    got = model.generate(params, PROMPT, 9, RNG, temperature=0.0)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, expected)
    assert len(set(np.asarray(got[4:]).tolist())) > 1  # not one token over and over


def test_cached_logits_equal_full_logits():
    model, params = model_and_params("unrolled")
    tokens = jax.random.randint(RNG, (2, 9), 0, 37)
    module = model.bind(params)
    extend = jax.jit(lambda params, *args: model.bind(params).extend(*args))
    first, caches = extend(params, tokens[:, :5], module.empty_caches(2, 9), jnp.int32(0))
    second, _ = extend(params, tokens[:, 5:], caches, jnp.int32(5))
    joined = jnp.concatenate([first.reshape(2, 5, 37), second.reshape(2, 4, 37)], axis=1)
    np.testing.assert_allclose(joined, jax.jit(model.logits)(params, tokens), atol=5e-5)


def test_bfloat16_cache():
    model, params = model_and_params("scan", compute_dtype="bfloat16")
    assert model.generate(params, PROMPT, 3, RNG).shape == (7,)


def test_sampling_depends_on_the_key_alone():
    model, params = model_and_params("unrolled")
    a, b = (model.generate(params, PROMPT, 9, jax.random.key(4), 1.3) for _ in range(2))
    c = model.generate(params, PROMPT, 9, jax.random.key(5), 1.3)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a[:4], PROMPT)
    assert (a != c).any()


def test_draws_follow_the_tempered_top_k_distribution():
    logits = jnp.array([1.0, 0.3, -0.4, 2.0, 1.4])
    keys = jax.random.split(RNG, 20_000)
    drawn = jax.vmap(lambda key: sample(logits, key, jnp.float32(0.7), 3))(keys)
    share = np.bincount(drawn, minlength=5) / 20_000
    expected = np.exp(np.asarray(logits) / 0.7) * np.array([1, 0, 0, 1, 1])
    np.testing.assert_allclose(share, expected / expected.sum(), atol=0.015)
    assert share[1] == share[2] == 0


def test_top_k_of_one_is_greedy():
    model, params = model_and_params("unrolled")
    greedy = model.generate(params, PROMPT, 6, RNG, temperature=0.0)
    np.testing.assert_array_equal(model.generate(params, PROMPT, 6, RNG, 5.0, top_k=1), greedy)


def test_all_bad_arguments_in_one_message():
    model, params = model_and_params("unrolled")
    with pytest.raises(ValueError) as error:
        model.generate(params, PROMPT[:0], 40, RNG, temperature=-1.0, top_k=0)
    for word in ("prompt", "max_seq_len", "temperature", "top_k"):
        assert word in str(error.value)
    with pytest.raises(ValueError, match="length"):
        model.generate(params, PROMPT, 0, RNG)
    for token in (-5, model.config.vocab_size):
        with pytest.raises(ValueError, match=rf"prompt has the tokens \[{token}\]: the vocabulary"):
            model.generate(params, jnp.array([3, token]), 2, RNG)
