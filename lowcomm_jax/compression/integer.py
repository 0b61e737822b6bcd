r"""int8 and int4 with one scale per block, symmetric or affine.

$$q = \lfloor x / s + \tfrac12 \rfloor,\; s = \max|x| / (2^{b-1} - 1) \qquad\text{or}\qquad
  q = \lfloor (x - l) / s + \tfrac12 \rfloor,\; l = \min x,\; s = (\max x - l) / (2^b - 1)$$

Error: at most s / 2. Values that are all equal come back up to a rounding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from lowcomm_jax.compression import blocks as cutting
from lowcomm_jax.compression.matrix import Leaf, PyTree, Shape
from lowcomm_jax.compression.packing import pack, packed_width, unpack
from lowcomm_jax.refused import in_range, refuse


@dataclasses.dataclass(frozen=True)
class Integer(cutting.InBlocks):
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

    bits: int = 8
    affine: bool = False
    block: int | None = 256

    def __post_init__(self) -> None:
        refuse(
            "Integer",
            [
                None if self.bits in (4, 8) else f"bits={self.bits}: use 4 or 8",
                in_range("block", self.block, 1, float("inf")),
            ],
        )

    @property
    def name(self) -> str:
        return f"int{self.bits}" + ("_affine" if self.affine else "")

    def encode(self, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        # No code needs clipping: |steps| exceeds its bound by a few ulp at most, far from the half
        # that would reach the next code. (A clip costs five times the rest on CPU.)
        x = cutting.to_blocks(x_LxNxM, cutting.cut(x_LxNxM.shape, self.block))
        if self.affine:
            low = jnp.min(x, axis=-1)
            scale = (jnp.max(x, axis=-1) - low) * (1.0 / (2**self.bits - 1))
            steps = (x - low[..., None]) * cutting.reciprocal(scale)[..., None]
            codes = jnp.floor(steps + 0.5)
            side = {"scale": scale, "low": low}
        else:
            half = 2 ** (self.bits - 1)
            scale = cutting.largest_magnitude(x) * (1.0 / (half - 1))
            # Codes are shifted by 2^(b-1) so that they are not negative.
            steps = x * cutting.reciprocal(scale)[..., None]
            codes = jnp.floor(steps + (half + 0.5))
            side = {"scale": scale}
        payload = {"codes": pack(codes.astype(jnp.uint8), self.bits), **side}
        size = self.unit(x_LxNxM.shape)
        return {k: cutting.sent(x, size) for k, x in payload.items()}, state

    def decode(self, payload: PyTree, shape: Shape) -> Leaf:
        payload = {k: cutting.received(x, self.unit(shape)) for k, x in payload.items()}
        _, width, by_row = cutting.cut(shape, self.block)
        codes = unpack(payload["codes"], self.bits, width).astype(jnp.float32)
        scale = payload["scale"][..., None]
        if self.affine:
            x = codes * scale + payload["low"][..., None]
        else:
            x = (codes - 2.0 ** (self.bits - 1)) * scale
        return cutting.from_blocks(x, shape, by_row)

    def nbytes(self, shape: Shape) -> int:
        count, width, _ = cutting.cut(shape, self.block)
        return shape[0] * count * (packed_width(width, self.bits) + (8 if self.affine else 4))
