"""Multiplies in the operands' dtype, accumulates and answers in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def wide_einsum(spec: str, a: Array, b: Array) -> Array:
    """Returns `einsum(spec, a, b)` in float32, without rounding to the operands' dtype.

    The backward products run in the operands' dtype: plain differentiation would multiply the
    float32 cotangent with bfloat16 operands, which accelerators do at float32 speed.

    Args:
      spec: two inputs and an output written out; each index occurs in at least two of the three.
      a, b: operands of one dtype.
    """
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _forward(spec, a, b):
    return wide_einsum(spec, a, b), (a, b)


def _backward(spec, operands, cotangent):
    a, b = operands
    inputs, out = spec.split("->")
    a_axes, b_axes = inputs.split(",")
    cotangent = cotangent.astype(a.dtype)
    return (
        jnp.einsum(f"{out},{b_axes}->{a_axes}", cotangent, b),
        jnp.einsum(f"{out},{a_axes}->{b_axes}", cotangent, a),
    )


wide_einsum.defvjp(_forward, _backward)
