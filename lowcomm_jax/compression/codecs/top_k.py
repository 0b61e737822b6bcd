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

from lowcomm_jax.compression.codecs.cast import FP32
from lowcomm_jax.compression.codecs.codebook import STAT2
from lowcomm_jax.compression.codecs.integer import INT4
from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.packing import pack, unpack
from lowcomm_jax.compression.units import Matrix, Payload, UnitCodec, not_of_units
from lowcomm_jax.refused import at_least, in_range, one_of, refuse


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
        refuse(
            type(self).__name__,
            [
                at_least("k", self.k, 1),
                at_least("block", self.block, 1) or in_range("block", self.block, 1, 64),
                not_of_units("values", self.values),
                f"values={self.values.name}: it sends indices itself: give a codec that sends all"
                if isinstance(self.values, TopK)
                else None,
                one_of("mean", self.mean, ("regions", "senders")),
            ],
        )

    @property
    def name(self) -> str:
        return f"topk{self.k}" + ("" if self.values == FP32 else f"_{self.values.name}")

    @property
    def unit(self) -> Unit:
        return Unit(self.block, self.block)

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        x = x if matrix.real is None else jnp.where(matrix.real, x, 0.0)
        size = math.prod(x.shape[-2:])
        inside = matrix._replace(real=None)  # what is kept are units of the same grid
        if size <= self.k:
            return self.values.encode(x.reshape(*x.shape[:3], 1, size), inside)
        bits = _index_bits(size)

        def choose(x):
            # Exact at recall 1, like `top_k`, but faster on some accelerators.
            index = jax.lax.approx_max_k(jnp.abs(x), self.k, recall_target=1.0)[1]
            kept = jnp.take_along_axis(x, index, axis=-1, mode="promise_in_bounds")
            return kept, pack(index.astype(jnp.uint8 if bits == 8 else jnp.uint16), bits)

        kept, index = matrix.each(choose, x)
        return {**self.values.encode(kept[..., None, :], inside), "index": index}

    def terms(self, payload: Payload, unit: tuple[int, int]) -> tuple[jax.Array, jax.Array | None]:
        size = math.prod(unit)
        k = min(self.k, size)
        beside = {name: x for name, x in payload.items() if name != "index"}
        kept = self.values.decode(beside, (1, k))[..., 0, :]
        if size <= self.k:
            values = kept.reshape(*kept.shape[:3], *unit)
            return values, None if self.mean == "regions" else jnp.ones_like(values)
        index = unpack(payload["index"], _index_bits(size), k).astype(jnp.int32)
        values = _placed(index, kept, unit)
        if self.mean == "regions":
            return values, None
        return values, _placed(index, jnp.ones_like(kept), unit)

    def decode(self, payload: Payload, unit: tuple[int, int]) -> jax.Array:
        return self.finish(self.terms(payload, unit)[0])

    def sends_all(self, unit: tuple[int, int]) -> bool:
        return math.prod(unit) <= self.k


def _index_bits(size: int) -> int:
    return 8 if size <= 256 else 12


def _placed(index: jax.Array, kept: jax.Array, unit: tuple[int, int]) -> jax.Array:
    """Values `[L, down, across, k]` where they stand in their units, and zeros elsewhere."""
    layers, down, across, k = index.shape
    height, width = unit
    # Straight into rows of the matrix: a CPU would copy it all once more to get them out of units.
    at = index // width * (across * width) + index % width
    at = at + width * jnp.arange(across, dtype=index.dtype).reshape(1, 1, -1, 1)

    def scatter(at, values):
        # "drop": an absent region's payload may hold anything.
        zeros = jnp.zeros(height * across * width)
        return zeros.at[at].set(values, mode="drop", unique_indices=True)

    rows = jax.vmap(scatter)(at.reshape(-1, across * k), kept.reshape(-1, across * k))
    return rows.reshape(layers, down, height, across, width).swapaxes(2, 3)


NAMES = {
    "topk": TopK(),
    "topk_int4": TopK(values=INT4),
    "topk_stat2": TopK(values=STAT2),
}
FEEDBACK = {"topk_stat2_ef": 0.95}
