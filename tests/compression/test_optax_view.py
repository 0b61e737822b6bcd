"""Codecs as Optax transforms: which codec a width names, and what EF21's receivers hold."""

import jax.numpy as jnp
import numpy as np

from lowcomm_jax.compression import compress, quantize


def test_ef21_updates_are_the_receivers_copy_not_its_increments():
    rule, x = compress("fp32", error_feedback="ef21"), jnp.array([0.3, -0.2])
    state = rule.init(x)
    for _ in range(2):  # the second increment is 0
        update, state = rule.update(x, state)
        np.testing.assert_array_equal(update, x)


def test_sixteen_bit_floats_are_bf16():
    x = jnp.linspace(-1.0, 0.7, 50)
    rule = quantize(16, "float")
    update, _ = rule.update(x, rule.init(x))
    np.testing.assert_array_equal(update, x.astype(jnp.bfloat16).astype(jnp.float32))
