r"""One bit per value and the mean magnitude: $C(x) = \frac{\|x\|_1}{d}\,\mathrm{sign}(x)$.

Source: EF-signSGD, arXiv 1901.09847, which needs error feedback to converge. Zero counts as
positive, which an input of zeros does not notice (its magnitude is 0).

Error: the distance of abs(x) from the mean magnitude. Values that are all equal come back up to a
rounding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from lowcomm_jax.compression import blocks as cutting
from lowcomm_jax.compression.matrix import Leaf, MatrixCodec, PyTree, Shape
from lowcomm_jax.compression.packing import pack, packed_width, unpack


@dataclasses.dataclass(frozen=True)
class Sign(MatrixCodec):
    """Keep the sign of every value, and one fp32 scale per matrix. A sign takes an eighth of a
    byte; signs are packed in blocks, each of which ends with a whole byte."""

    layers_apart = True
    takes_windows = True

    @property
    def name(self) -> str:
        return "sign"

    def encode(self, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        shape, blocks = x_LxNxM.shape, self._blocks(x_LxNxM.shape)
        x, real = cutting.to_blocks(x_LxNxM, blocks), cutting.real(shape, blocks)
        magnitude = jnp.abs(x_LxNxM) if real is None else jnp.where(real, jnp.abs(x), 0.0)
        scale = jnp.sum(magnitude, axis=(1, 2)) / float(shape[1] * shape[2])
        codes = pack((x >= 0).astype(jnp.uint8), 1)
        return {"codes": cutting.sent(codes, self.unit(shape)), "scale": scale}, state

    def decode(self, payload: PyTree, shape: Shape) -> Leaf:
        _, width, by_row = self._blocks(shape)
        codes = cutting.received(payload["codes"], self.unit(shape))
        positive = unpack(codes, 1, width).astype(jnp.float32)
        return cutting.from_blocks(
            (2.0 * positive - 1.0) * payload["scale"][:, None, None], shape, by_row
        )

    def _blocks(self, shape: Shape) -> cutting.Blocks:
        return cutting.cut(shape, cutting.PACKING_BLOCK)

    def rows_together(self, shape: Shape) -> int:
        return cutting.rows_together(shape, cutting.PACKING_BLOCK)

    def unit(self, shape: Shape) -> int:
        return cutting.unit(shape, self._blocks(shape))

    def nbytes(self, shape: Shape) -> int:
        count, width, _ = self._blocks(shape)
        return shape[0] * (count * packed_width(width, 1) + 4)
