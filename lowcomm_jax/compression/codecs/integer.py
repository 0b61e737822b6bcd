r"""int8 and int4 with one scale per block, symmetric or affine.

$$q = \lfloor x / s + \tfrac12 \rfloor,\; s = \max|x| / (2^{b-1} - 1) \qquad\text{or}\qquad
  q = \lfloor (x - l) / s + \tfrac12 \rfloor,\; l = \min x,\; s = (\max x - l) / (2^b - 1)$$

Error: at most s / 2. Values that are all equal come back up to a rounding.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.grid import WHOLE_ROW, Unit
from lowcomm_jax.compression.means import as_rounded
from lowcomm_jax.compression.packing import pack, unpack
from lowcomm_jax.compression.units import Matrix, Payload, UnitCodec, largest_magnitude, reciprocal
from lowcomm_jax.refused import at_least, refuse
from lowcomm_jax.settings import choices


@dataclasses.dataclass(frozen=True)
class Integer(UnitCodec):
    """Linear quantisation; per block one fp32 scale, and its minimum when affine.

    Values up to 1e38 are safe; blocks whose range is below 1e-36 are sent as one constant (0 when
    symmetric).

    Attributes:
      bits: 4 or 8.
      affine: use the block's own range instead of a symmetric one.
      block: values per scale; None = one per row.

    Raises:
      ValueError: bits or block out of range.
    """

    bits: Literal[4, 8] = 8
    affine: bool = False
    block: int | None = 256

    def __post_init__(self) -> None:
        block = None if self.block is None else at_least("block", self.block, 1)
        refuse("Integer", [*choices(Integer, self), block])

    @property
    def name(self) -> str:
        return f"int{self.bits}" + ("_affine" if self.affine else "")

    @property
    def unit(self) -> Unit:
        return WHOLE_ROW if self.block is None else Unit(1, self.block)

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        # No code needs clipping: |steps| exceeds its bound by a few ulp at most, far from the half
        # that would reach the next code. (A clip costs five times the rest on CPU.)
        x = x[..., 0, :]
        if self.affine:
            low = jnp.min(x, axis=-1)
            scale = (jnp.max(x, axis=-1) - low) * (1.0 / (2**self.bits - 1))
            codes = jnp.floor((x - low[..., None]) * reciprocal(scale)[..., None] + 0.5)
            beside = {"scale": scale, "low": low}
        else:
            half = 2 ** (self.bits - 1)
            scale = largest_magnitude(x) * (1.0 / (half - 1))
            # Codes are shifted by 2^(b-1) so that they are not negative.
            codes = jnp.floor(x * reciprocal(scale)[..., None] + (half + 0.5))
            beside = {"scale": scale}
        return {"codes": pack(codes.astype(jnp.uint8), self.bits), **beside}

    def decode(self, payload: Payload, unit: tuple[int, int]) -> jax.Array:
        codes = unpack(payload["codes"], self.bits, unit[1]).astype(jnp.float32)
        scale = payload["scale"][..., None]
        if self.affine:
            x = as_rounded(codes * scale) + payload["low"][..., None]
        else:
            x = (codes - 2.0 ** (self.bits - 1)) * scale
        return x[..., None, :]


INT4 = Integer(4)
NAMES = {
    "int8": Integer(8),
    "int4": INT4,
    "int8_affine": Integer(8, affine=True),
    "int4_affine": Integer(4, affine=True),
}
