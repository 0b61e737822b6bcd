"""Codecs as Optax transforms: which codec a width names, and what EF21's receivers hold."""

import codec_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm_jax import compression
from lowcomm_jax.compression import compress

SHAPES = {"bad": (8, 12), "good": (6, 10)}


def test_ef21_updates_are_the_receivers_copy_not_its_increments():
    rule, x = compress("fp32", error_feedback="ef21"), jnp.array([0.3, -0.2])
    state = rule.init(x)
    for _ in range(2):  # the second increment is 0
        update, state = rule.update(x, state)
        np.testing.assert_array_equal(update, x)


def test_sixteen_bit_floats_are_bf16():
    x = jnp.linspace(-1.0, 0.7, 50)
    rule = compress("bf16")
    update, _ = rule.update(x, rule.init(x))
    np.testing.assert_array_equal(update, x.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("name", compression.names())
def test_what_is_not_finite_comes_out_as_nan_and_leaves_no_trace(name):
    # With what is finite before and after, so that states have something to lose.
    rule = compress(codec_cases.build(name))
    first, then = (codec_cases.tree(s, SHAPES) for s in (1, 2))
    update = jax.jit(lambda x, state: rule.update(x, state, first))  # weights, for who reads them
    start = update(first, rule.init(first))[1]
    for value in (np.nan, np.inf, -np.inf):
        bad = first["bad"].copy()
        bad[3, 4] = value
        got, state = update({**first, "bad": bad}, start)
        assert np.isnan(got["bad"]).all(), value
        np.testing.assert_array_equal(got["good"], update(first, start)[0]["good"])
        after, _ = update(then, state)
        assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), after)), value


@pytest.mark.parametrize("feedback", [0.95, "ef21"])
def test_a_step_that_was_not_finite_takes_nothing_from_the_feedback(feedback):
    rule = compress("int4", feedback)
    update = jax.jit(rule.update)
    first, then = (codec_cases.tree(s, SHAPES) for s in (1, 2))
    start = rule.init(first)
    start = update(first, start)[1]
    nothing = {"bad": np.full_like(first["bad"], np.nan), "good": first["good"]}
    state = update(nothing, start)[1]
    without = update(then, start)[0]
    np.testing.assert_array_equal(update(then, state)[0]["bad"], without["bad"])


def test_a_check_behind_the_codec_sees_a_gradient_that_is_not_finite():
    x = jnp.array([1.0, jnp.nan], jnp.bfloat16)
    rule = optax.chain(compress("random_k"), optax.zero_nans())
    state = rule.update(x, rule.init(x))[1]
    assert state[1].found_nan
