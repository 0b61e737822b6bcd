r"""One bit per value and the mean magnitude: $C(x) = \frac{\|x\|_1}{d}\,\mathrm{sign}(x)$.

Source: EF-signSGD, arXiv 1901.09847, which needs error feedback to converge. Zero counts as
positive, which an input of zeros does not notice (its magnitude is 0).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from lowcomm_jax.compression.matrix import MatrixCodec, Shape
from lowcomm_jax.compression.packing import pack, packed_width, unpack


@dataclasses.dataclass(frozen=True)
class Sign(MatrixCodec):
    """Keep the sign of every value; an eighth of a byte each and one fp32 scale per matrix."""

    @property
    def name(self) -> str:
        return "sign"

    def encode(self, x_LxNxM, state):
        scale = jnp.mean(jnp.abs(x_LxNxM), axis=(1, 2))
        flat = x_LxNxM.reshape(x_LxNxM.shape[0], -1)
        return {"codes": pack((flat >= 0).astype(jnp.uint8), 1), "scale": scale}, state

    def decode(self, payload, shape):
        positive = unpack(payload["codes"], 1, shape[1] * shape[2]).reshape(shape)
        return (2.0 * positive.astype(jnp.float32) - 1.0) * payload["scale"][:, None, None]

    def nbytes(self, shape: Shape) -> int:
        return shape[0] * (packed_width(shape[1] * shape[2], 1) + 4)
