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
from lowcomm_jax.refused import in_range, refuse
from lowcomm_jax.settings import choices


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

    bits: Literal[2, 4, 8] = 4
    sigmas: float = 6.0
    scope: Literal["matrix", "row"] = "matrix"

    def __post_init__(self) -> None:
        sigmas = in_range("sigmas", self.sigmas, 0.0, float("inf"), open_low=True)
        refuse("Statistical", [*choices(Statistical, self), sigmas])

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

    @property
    def averaged(self) -> tuple[int, ...]:
        """The bins of which the mean travels."""
        return (0, self.bins - 1) if self.bits == 8 else tuple(range(self.bins))

    def encode(self, x: jax.Array, matrix: Matrix, params: jax.Array | None = None) -> Payload:
        largest = matrix.largest(jnp.max(jnp.abs(x), axis=(3, 4)))
        sums, counts = matrix.class_totals(x, jnp.zeros(x.shape, jnp.uint8), (0,))
        count, inverse = counts[..., 0], reciprocal(largest)
        mean = as_rounded(sums[..., 0] / jnp.maximum(count, 1.0))
        # In units of the largest magnitude: squares of 1e30 and 1e-30 leave the range of fp32.
        far = as_rounded(x - mean[..., None, None])
        squares = matrix.total(matrix.unit_sums(jnp.square(far * inverse[..., None, None])))
        deviation = jnp.sqrt(squares / jnp.maximum(count - 1.0, 1.0)) * largest
        step = as_rounded(deviation * (self.sigmas / self.bins))
        codes = jnp.floor(far * reciprocal(step)[..., None, None] + (self.bins / 2 + 0.5))
        # Two selects, not a clip: a CPU vectorises them.
        codes = jnp.where(codes < 0.0, 0.0, codes)
        codes = jnp.where(codes > self.bins - 1.0, self.bins - 1.0, codes).astype(jnp.uint8)
        # A bin's mean is that of the group and the mean distance from it, so that values that are
        # all equal come back exactly.
        sums, counts = matrix.class_totals(far, codes, self.averaged)
        sums = jnp.where(counts > 0, sums, self._centres(self.averaged, step))
        # The division keeps a product from being joined with the sum that follows.
        book = mean[..., None] + sums / jnp.maximum(counts, 1.0)
        if self.bits == 8:
            book = jnp.concatenate([mean[..., None], step[..., None], book], axis=-1)
        return {"codes": pack(codes[..., 0, :], self.bits), "book": book}

    def _centres(self, bins, step):
        """Distance of the bins' centres from the mean, `[L, groups, 1, bins]`."""
        return (jnp.array(bins, jnp.float32) - self.bins / 2).reshape(1, 1, 1, -1) * step[..., None]

    def decode(self, payload: Payload, unit: tuple[int, int]) -> jax.Array:
        codes, book = unpack(payload["codes"], self.bits, unit[1]), payload["book"]
        if self.bits == 8:
            centres = as_rounded(self._centres(range(1, self.bins - 1), book[..., 1]))
            middle = book[..., 0:1] + centres
            book = jnp.concatenate([book[..., 2:3], middle, book[..., 3:4]], axis=-1)
        book = jnp.broadcast_to(book, (*codes.shape[:3], self.bins))
        at = codes.astype(jnp.int32)
        return jnp.take_along_axis(book, at, axis=-1, mode="promise_in_bounds")[..., None, :]


NAMES = {"stat8": Statistical(8), "stat4": Statistical(4), "stat2": Statistical(2)}
FEEDBACK = {"stat2_ef": 0.95}
