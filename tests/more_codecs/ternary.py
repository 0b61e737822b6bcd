"""Ternary: the signs of values above a share of their unit's largest, and a scale a unit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.packing import pack, unpack
from lowcomm_jax.compression.units import (
    Matrix,
    Payload,
    UnitCodec,
    largest_magnitude,
    reciprocal,
)


@dataclasses.dataclass(frozen=True)
class Ternary(UnitCodec):
    """See the module.

    Attributes:
      share: of the largest magnitude; what is smaller is sent as 0.
    """

    share: float = 0.5
    name = "ternary"
    unit = Unit(1, 256)

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        x = x[..., 0, :]
        scale = largest_magnitude(x)
        y = x * reciprocal(scale)[..., None]
        code = jnp.where(y > self.share, 2, jnp.where(y < -self.share, 0, 1))
        return {"codes": pack(code.astype(jnp.uint8), 2), "scale": scale}

    def decode(self, payload: Payload, unit: Unit) -> jax.Array:
        code = unpack(payload["codes"], 2, unit[1]).astype(jnp.float32) - 1.0
        return (code * payload["scale"][..., None])[..., None, :]


NAMES = {"ternary": Ternary()}
FEEDBACK = {"ternary_ef": 1.0}
