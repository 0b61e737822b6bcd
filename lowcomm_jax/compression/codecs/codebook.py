r"""Quantise to 8, 4 or 2 bits around the mean; decode with a codebook of bin means.

$$q = \mathrm{clip}\big(\lfloor (x - \mu)/s + B/2 + \tfrac12 \rfloor,\, 0,\, B - 1\big), \qquad
  s = \rho\,\sigma / B, \qquad \hat x = \mathrm{mean}\{x : q(x) = q\}$$

| symbol | meaning |
| --- | --- |
| $B$ | $2^{bits}$ bins |
| $\mu, \sigma$ | mean and unbiased standard deviation of the group (a matrix, or a row) |
| $\rho$ | `sigmas`: full width of the range, so 6 means three to each side |

Error: at most s for values outside of the two end bins. A decoded value lies in the range of its
group, or, with 8 bits, at most s outside of it; so a value in an end bin is off by the range at
most. Values that are all equal come back up to a rounding.

Source: the quantiser of INTELLECT-1 (arXiv 2412.01152, 8 bits), MuLoCo (2505.23725, 4 and 2 bits)
and SparseLoCo (2508.15706, 2 bits on the kept values).

Differs from the papers: with 8 bits only the two end bins, which hold everything beyond the range,
travel as means. The other 254 decode to their centres, which saves 1 KiB per group (and is off by
about 1 % of the rounding error). An empty bin decodes to its centre.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.packing import pack, unpack
from lowcomm_jax.compression.units import Matrix, Payload, UnitCodec, as_rounded, reciprocal
from lowcomm_jax.refused import in_range, one_of, refuse


@dataclasses.dataclass(frozen=True)
class Statistical(UnitCodec):
    """Quantise to 2^bits bins of equal width around the mean (see the module).

    Attributes:
      bits: 2, 4 or 8.
      sigmas: full width of the binned range in standard deviations.
      scope: one grid per `matrix` or per `row`.

    Raises:
      ValueError: a setting out of range.
    """

    bits: int = 4
    sigmas: float = 6.0
    scope: Literal["matrix", "row"] = "matrix"

    def __post_init__(self) -> None:
        refuse(
            "Statistical",
            [
                None if self.bits in (2, 4, 8) else f"bits={self.bits}: use 2, 4 or 8",
                in_range("sigmas", self.sigmas, 0.0, float("inf"), open_low=True),
                one_of("scope", self.scope, ("matrix", "row")),
            ],
        )

    @property
    def name(self) -> str:
        return f"stat{self.bits}" + ("_row" if self.scope == "row" else "")

    @property
    def unit(self) -> Unit:
        return Unit(1, 256, "apart" if self.scope == "row" else None)

    @property
    def bins(self) -> int:
        """B, number of bins."""
        return 2**self.bits

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        largest = matrix.largest(jnp.max(jnp.abs(x), axis=(3, 4)))
        sums, counts = matrix.class_sums(x, jnp.zeros(x.shape, jnp.uint8), 1)
        both = matrix.total(jnp.concatenate([sums, counts], axis=-1))
        count, inverse = both[..., 1], reciprocal(largest)
        mean = as_rounded(both[..., 0] / jnp.maximum(count, 1.0))
        # In units of the largest magnitude: squares of 1e30 and 1e-30 leave the range of fp32.
        far = as_rounded(x - mean[..., None, None])
        squares = matrix.total(matrix.unit_sums(jnp.square(far * inverse[..., None, None])))
        deviation = jnp.sqrt(squares / jnp.maximum(count - 1.0, 1.0)) * largest
        step = as_rounded(deviation * (self.sigmas / self.bins))
        codes = jnp.floor(far * reciprocal(step)[..., None, None] + (self.bins / 2 + 0.5))
        # Two selects, not a clip: a CPU vectorises them.
        codes = jnp.where(codes < 0.0, 0.0, codes)
        codes = jnp.where(codes > self.bins - 1.0, self.bins - 1.0, codes).astype(jnp.uint8)
        book = self._book(far, codes, mean, step, matrix)
        return {"codes": pack(codes[..., 0, :], self.bits), "book": book}

    def _book(self, far, codes, mean, step, matrix):
        """`[L, groups, 1, bins]`; with 8 bits `[..., 4]`: mean, step, low and high end.

        A bin's mean is that of the group and the mean distance from it, so that values that are all
        equal come back exactly.
        """
        if self.bits == 8:
            # Only the two ends travel as means.
            middle = (codes > 0) & (codes < self.bins - 1)
            codes = jnp.where(middle, jnp.uint8(2), (codes > 0).astype(jnp.uint8))
        classes = 2 if self.bits == 8 else self.bins
        found = jnp.concatenate(matrix.class_sums(far, codes, classes), axis=-1)
        sums, counts = jnp.split(matrix.total(found), 2, axis=-1)
        centres = self._offsets() * step[..., None]
        if self.bits == 8:
            centres = centres[..., :: self.bins - 1]
        # The division keeps a product from being joined with the sum that follows.
        apart = jnp.where(counts > 0, sums, centres) / jnp.maximum(counts, 1.0)
        means = mean[..., None] + apart
        if self.bits < 8:
            return means
        return jnp.concatenate([mean[..., None], step[..., None], means], axis=-1)

    def _offsets(self):
        """Distance of the bins' centres from the mean, in steps: `[1, 1, 1, bins]`."""
        return (jnp.arange(self.bins, dtype=jnp.float32) - self.bins / 2).reshape(1, 1, 1, -1)

    def decode(self, payload: Payload, unit: tuple[int, int]) -> jax.Array:
        codes = unpack(payload["codes"], self.bits, unit[1])
        book = payload["book"]
        if self.bits == 8:
            centres = book[..., 0:1] + as_rounded(self._offsets() * book[..., 1:2])
            book = jnp.concatenate([book[..., 2:3], centres[..., 1:-1], book[..., 3:4]], axis=-1)
        book = jnp.broadcast_to(book, (*codes.shape[:3], self.bins))
        at = codes.astype(jnp.int32)
        return jnp.take_along_axis(book, at, axis=-1, mode="promise_in_bounds")[..., None, :]


STAT2 = Statistical(2)
NAMES = {"stat8": Statistical(8), "stat4": Statistical(4), "stat2": STAT2}
FEEDBACK = {"stat2_ef": 0.95}
