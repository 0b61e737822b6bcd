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

from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.packing import pack, unpack
from lowcomm_jax.compression.units import Matrix, Payload, UnitCodec


@dataclasses.dataclass(frozen=True)
class Sign(UnitCodec):
    """Keep the sign of every value, and one fp32 scale per matrix. A sign takes an eighth of a
    byte; signs are packed in blocks, each of which ends with a whole byte."""

    requantizable = False

    @property
    def name(self) -> str:
        return "sign"

    @property
    def unit(self) -> Unit:
        return Unit(1, 256)

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        total = matrix.total(matrix.unit_sums(jnp.abs(x)))
        scale = total * (1.0 / matrix.total(matrix.counts(x)))
        return {"codes": pack((x[..., 0, :] >= 0).astype(jnp.uint8), 1), "scale": scale}

    def decode(self, payload: Payload, unit: tuple[int, int]) -> jax.Array:
        positive = unpack(payload["codes"], 1, unit[1]).astype(jnp.float32)
        return ((2.0 * positive - 1.0) * payload["scale"][..., None])[..., None, :]


NAMES = {"sign": Sign()}
FEEDBACK = {"sign_ef": 1.0}
