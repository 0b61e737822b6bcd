r"""One bit per value and the mean magnitude: $C(x) = \frac{\|x\|_1}{d}\,\mathrm{sign}(x)$.

Source: EF-signSGD, arXiv 1901.09847, which needs error feedback to converge. Zero counts as
positive, which an input of zeros does not notice (its magnitude is 0).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from lowcomm_jax.compression import blocks as cutting
from lowcomm_jax.compression.matrix import MatrixCodec, Shape
from lowcomm_jax.compression.packing import pack, packed_width, unpack


@dataclasses.dataclass(frozen=True)
class Sign(MatrixCodec):
    """Keep the sign of every value; an eighth of a byte each (rows apart, so that each ends with a
    whole byte) and one fp32 scale per matrix."""

    @property
    def name(self) -> str:
        return "sign"

    def encode(self, x_LxNxM, state):
        scale = jnp.mean(jnp.abs(x_LxNxM), axis=(1, 2))
        x = cutting.to_blocks(x_LxNxM, cutting.whole_rows(x_LxNxM.shape))
        return {"codes": pack((x >= 0).astype(jnp.uint8), 1), "scale": scale}, state

    def decode(self, payload, shape):
        _, width, by_row = cutting.whole_rows(shape)
        positive = cutting.from_blocks(unpack(payload["codes"], 1, width), shape, by_row)
        return (2.0 * positive.astype(jnp.float32) - 1.0) * payload["scale"][:, None, None]

    def nbytes(self, shape: Shape) -> int:
        count, width, _ = cutting.whole_rows(shape)
        return shape[0] * (count * packed_width(width, 1) + 4)
