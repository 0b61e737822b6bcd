"""Narrower floats: fp32 (exact), bf16, fp16.

Error: at most abs(x) 2^-8 with bf16; with fp16 abs(x) 2^-11 or 3e-8, whichever is more.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.matrix import Leaf, MatrixCodec, PyTree, Shape
from lowcomm_jax.refused import one_of, refuse

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
HALF_MAX = 65504.0


@dataclasses.dataclass(frozen=True)
class Cast(MatrixCodec):
    """Round every value to a float format; the bits travel as integers of the same width.

    Integers, because some compilers widen narrow floats on the way through a collective. fp16
    saturates at 65504 instead of overflowing; values below about 3e-8 become 0.

    Attributes:
      format: `fp32`, `bf16` or `fp16`.

    Raises:
      ValueError: unknown format.
    """

    format: Literal["fp32", "bf16", "fp16"] = "fp32"
    requantizable = True
    layers_apart = True

    def __post_init__(self) -> None:
        refuse("Cast", [one_of("format", self.format, tuple(WIDTHS))])

    @property
    def name(self) -> str:
        return self.format

    def encode(self, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        if self.format == "fp32":
            return x_LxNxM, state
        if self.format == "fp16":
            narrow = jnp.clip(x_LxNxM, -HALF_MAX, HALF_MAX).astype(jnp.float16)
        else:
            narrow = x_LxNxM.astype(jnp.bfloat16)
        # Compilers of GPUs drop a float's way to a narrower one and back within a program, and with
        # it the rounding that residuals and measured errors are about.
        narrow = jax.lax.optimization_barrier(narrow)
        return jax.lax.bitcast_convert_type(narrow, jnp.uint16), state

    def decode(self, payload: PyTree, shape: Shape) -> Leaf:
        if self.format == "fp32":
            return payload
        dtype = jnp.float16 if self.format == "fp16" else jnp.bfloat16
        return jax.lax.bitcast_convert_type(payload, dtype).astype(jnp.float32)

    def rows_together(self, shape: Shape) -> int:
        return 0

    def nbytes(self, shape: Shape) -> int:
        return WIDTHS[self.format] * math.prod(shape)


FP32 = Cast("fp32")
