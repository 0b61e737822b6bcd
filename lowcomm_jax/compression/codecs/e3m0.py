r"""E3M0: a 4-bit float of one sign and three exponent bits, one scale per block.

Magnitudes are 0 and $s \cdot 2^e$, $e = -2 \dots 4$, with $s = \max|x| / 16$ over the block, and
every value goes to the nearest one (halfway: away from zero). Relative error: at most 1/3 from
$3s/16$ on; up to 1 in $[s/8, 3s/16)$, which goes to $s/4$, too. Smaller values become 0. Values
that are all equal come back up to a rounding.

Source: Streaming DiLoCo, arXiv 2501.18512, which casts outer gradients to E3M0 before they are
sent and accumulates in fp32.

Differs from the paper: the paper gives no scale; the rule above is ours.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.grid import WHOLE_ROW, Unit
from lowcomm_jax.compression.packing import pack, unpack
from lowcomm_jax.compression.units import Matrix, Payload, UnitCodec, largest_magnitude, reciprocal
from lowcomm_jax.refused import at_least, refuse

LARGEST = 16.0  # 2^4
CODE_OF_EXPONENT = 127 - 3  # fp32's biased exponent of 2^-3, which would be code 0
SIGN = 8


@dataclasses.dataclass(frozen=True)
class E3M0(UnitCodec):
    """Quantise to signed powers of two; half a byte per value and an fp32 scale per block.

    Attributes:
      block: values per scale; None = one per row.

    Raises:
      ValueError: block below 1.
    """

    block: int | None = 256

    def __post_init__(self) -> None:
        refuse("E3M0", [None if self.block is None else at_least("block", self.block, 1)])

    @property
    def name(self) -> str:
        return "e3m0"

    @property
    def unit(self) -> Unit:
        return WHOLE_ROW if self.block is None else Unit(1, self.block)

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        x = x[..., 0, :]
        scale = largest_magnitude(x) * (1.0 / LARGEST)
        magnitude = jnp.abs(x) * reciprocal(scale)[..., None]
        # Nearest power of two: midpoints are 1.5 * 2^e, so the exponent of 4/3 x is the answer.
        bits = jax.lax.bitcast_convert_type(magnitude * (4 / 3), jnp.int32)
        # The smallest power, 1/4, wins against 0 from 1/8 on, not from 3/16.
        code = jnp.maximum((bits >> 23) - CODE_OF_EXPONENT, (magnitude >= 0.125).astype(jnp.int32))
        code = jnp.where(x < 0, code + SIGN, code).astype(jnp.uint8)
        return {"codes": pack(code, 4), "scale": scale}

    def decode(self, payload: Payload, unit: tuple[int, int]) -> jax.Array:
        codes = unpack(payload["codes"], 4, unit[1]).astype(jnp.int32)
        code = codes & 7
        power = jax.lax.bitcast_convert_type((code + CODE_OF_EXPONENT) << 23, jnp.float32)
        magnitude = jnp.where(code == 0, 0.0, power)
        x = jnp.where(codes >= SIGN, -magnitude, magnitude) * payload["scale"][..., None]
        return x[..., None, :]


NAMES = {"e3m0": E3M0()}
