r"""Send the k largest values of every chunk, with packed indices.

`TopK` cuts a matrix into chunks of up to 64 x 64 (`grid`), a vector into chunks of up to 64. Each
chunk sends its k values of largest magnitude and where they stand: 12 bits each, two in three bytes
(8 bits in chunks of up to 256). Chunks of at most k values travel whole, without indices.

Error: that of `values` for a value that is kept; the value itself for one that is not, which is at
most the smallest magnitude kept in its chunk.

Source: SparseLoCo, arXiv 2508.15706 (k = 64; values then quantised to 2 bits); chunks as in DeMo,
arXiv 2411.19870.

Differs from the papers: a side without a divisor between 16 and 64 is cut into equal chunks, the
last one padded, and not into the chunks of a smaller divisor.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.chosen import choose, put_back
from lowcomm_jax.compression.codecs.cast import FP32
from lowcomm_jax.compression.codecs.codebook import Statistical
from lowcomm_jax.compression.codecs.integer import INT4
from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.units import Matrix, Payload, UnitCodec, not_of_units
from lowcomm_jax.refused import at_least, in_range, refuse
from lowcomm_jax.settings import choices


@dataclasses.dataclass(frozen=True)
class TopK(UnitCodec):
    """Keep k values per chunk and code them with `values`.

    Attributes:
      k: values kept per chunk.
      block: largest side of a chunk, at most 64.
      values: codec of the kept values: units `[L, down, across, 1, k]` in order of magnitude.
      mean: over all `regions` of a round (arXiv 2508.15706), or per entry over its `senders`
        (arXiv 2411.19870).

    Raises:
      ValueError: a setting out of range.
    """

    k: int = 64
    block: int = 64
    values: UnitCodec = FP32
    mean: Literal["regions", "senders"] = "regions"
    requantizable = False

    def __post_init__(self) -> None:
        block = at_least("block", self.block, 1) or in_range("block", self.block, 1, 64)
        found = [*choices(TopK, self), at_least("k", self.k, 1), block]
        found.append(not_of_units("values", self.values))
        if isinstance(self.values, TopK):
            why = "it sends indices itself: give a codec that sends all"
            found.append(f"values={self.values.name}: {why}")
        refuse(type(self).__name__, found)

    @property
    def name(self) -> str:
        return f"topk{self.k}" + ("" if self.values == FP32 else f"_{self.values.name}")

    @property
    def unit(self) -> Unit:
        return Unit(self.block, self.block)

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        x, inside = matrix.filled(x), matrix.unpadded
        if self.sends_all(x.shape[3:]):
            return self.values.encode(x.reshape(*x.shape[:3], 1, -1), inside)
        kept, index = choose(x, self.k)
        return {**self.values.encode(kept[..., None, :], inside), "index": index}

    def summands(
        self, payload: Payload, unit: tuple[int, int]
    ) -> tuple[jax.Array, jax.Array | None]:
        coded, k = dict(payload), min(self.k, math.prod(unit))
        index = None if self.sends_all(unit) else coded.pop("index")
        kept = self.values.decode(coded, (1, k))[..., 0, :]
        values = put_back(kept, index, unit)
        if self.mean == "regions":
            return values, None
        return values, put_back(jnp.ones_like(kept), index, unit)

    def decode(self, payload: Payload, unit: tuple[int, int]) -> jax.Array:
        return self.finish(self.summands(payload, unit)[0])

    def sends_all(self, unit: tuple[int, int]) -> bool:
        return math.prod(unit) <= self.k


NAMES = {
    "topk": TopK(),
    "topk_int4": TopK(values=INT4),
    "topk_stat2": TopK(values=Statistical(2)),
}
FEEDBACK = {"topk_stat2_ef": 0.95}
