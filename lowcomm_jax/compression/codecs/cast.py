"""Narrower floats: fp32 (exact), bf16, fp16.

Error: at most abs(x) 2^-8 with bf16; with fp16 abs(x) 2^-11 or 3e-8, whichever is more.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.grid import VALUE, Unit
from lowcomm_jax.compression.units import Matrix, Payload, UnitCodec
from lowcomm_jax.refused import refuse
from lowcomm_jax.settings import choices

HALF_MAX = 65504.0


@dataclasses.dataclass(frozen=True)
class Cast(UnitCodec):
    """Round every value to a float format; the bits travel as integers of the same width.

    Integers, because some compilers widen narrow floats on the way through a collective. fp16
    saturates at 65504 instead of overflowing; values below about 3e-8 become 0.

    Attributes:
      format: `fp32`, `bf16` or `fp16`.

    Raises:
      ValueError: unknown format.
    """

    format: Literal["fp32", "bf16", "fp16"] = "fp32"

    def __post_init__(self) -> None:
        refuse("Cast", choices(Cast, self))

    @property
    def name(self) -> str:
        return self.format

    @property
    def unit(self) -> Unit:
        return VALUE

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        # Units of another codec's chosen values are one row; a single value needs no axis.
        x = jnp.squeeze(x, tuple(axis for axis in (3, 4) if x.shape[axis] == 1))
        if self.format == "fp32":
            return {"values": x}
        if self.format == "fp16":
            narrow = jnp.clip(x, -HALF_MAX, HALF_MAX).astype(jnp.float16)
        else:
            narrow = x.astype(jnp.bfloat16)
        # Compilers of GPUs drop a float's way to a narrower one and back within a program, and with
        # it the rounding that residuals and measured errors are about.
        narrow = jax.lax.optimization_barrier(narrow)
        return {"bits": jax.lax.bitcast_convert_type(narrow, jnp.uint16)}

    def decode(self, payload: Payload, unit: tuple[int, int]) -> jax.Array:
        if self.format == "fp32":
            return payload["values"].reshape(*payload["values"].shape[:3], *unit)
        dtype = jnp.float16 if self.format == "fp16" else jnp.bfloat16
        wide = jax.lax.bitcast_convert_type(payload["bits"], dtype).astype(jnp.float32)
        return wide.reshape(*wide.shape[:3], *unit)


FP32 = Cast("fp32")
NAMES = {"fp32": FP32, "bf16": Cast("bf16"), "fp16": Cast("fp16")}
