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
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.compression import blocks as cutting
from lowcomm_jax.compression.blocks import Blocks
from lowcomm_jax.compression.matrix import Leaf, MatrixCodec, PyTree, Shape
from lowcomm_jax.compression.packing import pack, packed_width, unpack
from lowcomm_jax.compression.row_sharding import axes_inside, leaf_windows, on_rows
from lowcomm_jax.refused import in_range, one_of, refuse

LANES = 1 << 19  # partial sums kept side by side; so many stay in a CPU's cache
LEAST = 32  # lanes of a group, at least


class Grid(NamedTuple):
    """The bins of each group; fp32 `[L, 1, 1]` or `[L, N, 1]` each."""

    mean: jax.Array
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Statistical(MatrixCodec):
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
    requantizable = True
    layers_apart = True
    takes_windows = True

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
    def bins(self) -> int:
        """B, number of bins."""
        return 2**self.bits

    def _total(self, x_LxNxM: jax.Array) -> jax.Array:
        """Sum over each group, fp32 `[L, 1, 1]` or `[L, N, 1]`."""
        # Row sums first: a CPU adds one long row ten times slower than many short ones.
        rows = jnp.sum(x_LxNxM, axis=2, keepdims=True)
        return jnp.sum(rows, axis=1, keepdims=True) if self.scope == "matrix" else rows

    def _grid(self, x_LxNxM: jax.Array, size: int, real: jax.Array | None) -> Grid:
        """The grid of groups of `size` values, taken over those that are `real` (None = all)."""
        largest = cutting.largest_magnitude(x_LxNxM)[..., None]
        if self.scope == "matrix":
            largest = jnp.max(largest, axis=1, keepdims=True)
        mean = self._total(_only(real, x_LxNxM)) / float(size)
        # In units of the largest magnitude: squares of 1e30 and 1e-30 leave the range of fp32.
        inverse = cutting.reciprocal(largest)
        squares = _only(real, jnp.square(x_LxNxM * inverse - mean * inverse))
        variance = self._total(squares) / float(max(size - 1, 1))
        return Grid(mean, jnp.sqrt(variance) * largest * (self.sigmas / self.bins))

    def _size(self, shape: Shape) -> int:
        """Values per group."""
        return shape[2] * (shape[1] if self.scope == "matrix" else 1)

    def _centres(self, grid: Grid) -> jax.Array:
        """Bin centres `[L, groups, bins]`."""
        offsets = jnp.arange(self.bins, dtype=jnp.float32) - self.bins / 2
        return grid.mean + grid.step * offsets[None, None]

    def _positions(self, x: jax.Array, mean: jax.Array, step: jax.Array) -> jax.Array:
        """Where x lies on the grid, in bins from the left edge of bin 0."""
        return (x - mean) * cutting.reciprocal(step) + (self.bins / 2 + 0.5)

    def _codes(self, x: jax.Array, mean: jax.Array, step: jax.Array) -> jax.Array:
        """Bin numbers as floats; mean and step broadcast against x."""
        codes = jnp.floor(self._positions(x, mean, step))
        # Two selects, not a clip: a CPU vectorises them.
        codes = jnp.where(codes < 0.0, 0.0, codes)
        return jnp.where(codes > self.bins - 1.0, self.bins - 1.0, codes)

    def _classes(self, x: jax.Array, mean: jax.Array, step: jax.Array) -> jax.Array:
        """Classes whose means travel: the bins; with 8 bits the low end, the middle, the high."""
        if self.bits < 8:
            return self._codes(x, mean, step)
        at = self._positions(x, mean, step)
        return (at >= 1.0).astype(jnp.float32) + (at >= self.bins - 1.0).astype(jnp.float32)

    def encode(self, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        shape = x_LxNxM.shape
        if self._rows_apart(shape):
            rows = cutting.to_blocks(x_LxNxM, Blocks(*shape[1:], by_row=True))
            payload = on_rows(lambda x, _: self._encode(x, x.shape), rows.shape[1], rows)
            return {k: cutting.sent(x, self.unit(shape)) for k, x in payload.items()}, state
        real = cutting.real(shape, self._blocks(shape))
        if real is not None:
            # Sums over the whole leaf do not depend on how it is cut.
            x_LxNxM = cutting.to_blocks(x_LxNxM, self._blocks(shape))
        payload = self._encode(x_LxNxM, shape, real)
        return payload | {"codes": cutting.sent(payload["codes"], self.unit(shape))}, state

    def _rows_apart(self, shape: Shape) -> bool:
        """Whether rows share no grid; a single row counts as a matrix."""
        return self.scope == "row" and shape[1] > 1

    def _encode(self, x_LxNxM, shape: Shape, real=None) -> dict[str, jax.Array]:
        """Encode rows, or the blocks of a matrix of this shape whose own values are `real`."""
        grid = self._grid(x_LxNxM, self._size(shape), real)
        codes = self._codes(x_LxNxM, *grid).astype(jnp.uint8)
        if real is None:
            codes = cutting.to_blocks(codes, self._blocks(shape))
        return {"codes": pack(codes, self.bits), "book": self._book(x_LxNxM, grid, real)}

    def _book(self, x_LxNxM: jax.Array, grid: Grid, real: jax.Array | None) -> jax.Array:
        """fp32 `[L, groups, bins]`; with 8 bits `[L, groups, 4]`: mean, step, low and high end."""
        groups = grid.mean.shape[0] * grid.mean.shape[1]
        flat = Grid(*(g.reshape(groups, 1) for g in grid))
        classes = self.bins if self.bits < 8 else 4

        def classify(x, *grid):
            found = self._classes(x, *grid)
            return found if real is None else jnp.where(real.reshape(1, -1), found, -1.0)

        sums, counts = bin_sums(x_LxNxM.reshape(groups, -1), classify, flat, classes)
        means = (sums / jnp.maximum(counts, 1.0)).reshape(*grid.mean.shape[:2], classes)
        counts, centres = counts.reshape(means.shape), self._centres(grid)
        if self.bits < 8:
            return jnp.where(counts > 0, means, centres)
        ends = jnp.where(counts[..., 0:3:2] > 0, means[..., 0:3:2], centres[..., :: self.bins - 1])
        return jnp.concatenate([grid.mean, grid.step, ends], axis=2)

    def decode(self, payload: PyTree, shape: Shape) -> Leaf:
        _, width, by_row = self._blocks(shape)
        codes, book = cutting.received(payload["codes"], self.unit(shape)), payload["book"]
        if self._rows_apart(shape):
            book = cutting.received(book, self.unit(shape))
            rows = (codes.reshape(*book.shape[:2], -1, codes.shape[2]), book)
            values = on_rows(lambda own, _: self._look_up(*own, width), book.shape[1], rows)
            values = values.reshape(*book.shape[:2], -1)[:, :, : shape[2]]
            return cutting.from_blocks(values, shape, by_row=True)
        apart = codes.shape[1] if leaf_windows() is not None else shape[1] if by_row else 1
        values = on_rows(lambda own, book: self._look_up(own, book, width), apart, codes, book)
        return cutting.from_blocks(values, shape, by_row)

    def _look_up(self, packed: jax.Array, book: jax.Array, width: int) -> jax.Array:
        """Decode blocks of `width` values with the codebooks of their rows or of the matrix."""
        codes = unpack(packed, self.bits, width)
        if self.bits == 8:
            centres = self._centres(Grid(book[..., 0:1], book[..., 1:2]))
            book = jnp.concatenate([book[..., 2:3], centres[..., 1:-1], book[..., 3:4]], axis=2)
        groups = book.shape[0] * book.shape[1]
        look_up = jax.vmap(lambda row, at: row.at[at].get(mode="promise_in_bounds"))
        values = look_up(book.reshape(groups, -1), codes.reshape(groups, -1).astype(jnp.int32))
        return values.reshape(codes.shape)

    def _blocks(self, shape: Shape) -> Blocks:
        """The blocks that codes are packed by; rows with a grid each are packed apart."""

        found = cutting.cut(shape, cutting.PACKING_BLOCK)
        if self.scope == "matrix" or found.by_row:
            return found
        return Blocks(shape[1], shape[2], by_row=True)

    def rows_together(self, shape: Shape) -> int:
        return 1 if self._blocks(shape).by_row else shape[1]

    def unit(self, shape: Shape) -> int:
        return shape[2] if self._rows_apart(shape) else cutting.unit(shape, self._blocks(shape))

    def nbytes(self, shape: Shape) -> int:
        count, width, _ = self._blocks(shape)
        groups = 1 if self.scope == "matrix" else shape[1]
        book = 4 if self.bits == 8 else self.bins
        return shape[0] * (count * packed_width(width, self.bits) + groups * 4 * book)


def _only(real: jax.Array | None, x: jax.Array) -> jax.Array:
    """x, with zeros where it is not `real`."""
    return x if real is None else jnp.where(real, x, 0.0)


# Sums and counts of the values in each bin, in the formulation that suits the platform.


def bin_sums(
    x_GxW: jax.Array, classify: Callable, grid: tuple[jax.Array, ...], bins: int
) -> tuple[jax.Array, jax.Array]:
    """Add and count the values of each group that fall into each bin.

    Args:
      x_GxW: fp32 values, G groups.
      classify: `(x_GxW, *grid) -> bin numbers` as floats, elementwise.
      grid: parameters of the groups, `[G, 1]` each.
      bins: number of bins, at most 16.

    Returns:
      (sums, counts), fp32 `[G, bins]`.
    """

    # A CPU compiler writes the masks out in full. Elsewhere one fused pass over the masks is
    # fastest, and it leaves sharded values where they are.
    if axes_inside():
        return _by_masks(x_GxW, classify, grid, bins)

    def by_lanes(x, *grid):
        return _by_lanes(x, classify, grid, bins)

    def by_masks(x, *grid):
        return _by_masks(x, classify, grid, bins)

    return jax.lax.platform_dependent(x_GxW, *grid, cpu=by_lanes, default=by_masks)


def _by_masks(x_GxW, classify, grid, bins):
    codes = classify(x_GxW, *grid)
    masks = [codes == b for b in range(bins)]
    sums = [jnp.sum(jnp.where(m, x_GxW, 0.0), axis=1) for m in masks]
    counts = [jnp.sum(m.astype(jnp.float32), axis=1) for m in masks]
    return jnp.stack(sums, axis=1), jnp.stack(counts, axis=1)


def _by_lanes(x_GxW, classify, grid, bins):
    """Add piece after piece to lanes, and the lanes at the end.

    Every step is elementwise, so that a CPU's cores and vector units share it.
    """
    groups, size = x_GxW.shape
    together = min(groups, LANES // (bins * LEAST))
    width = min(size, LANES // (bins * together))
    numbers_Bx1 = jnp.arange(bins, dtype=jnp.float32)[:, None]
    pieces, rest = divmod(size, width)

    def one(x_W, *own):
        grid = [g[None] for g in own]
        # Counted by pieces: an index of values may exceed int32.
        x_PxW = jax.lax.slice_in_dim(x_W, 0, pieces * width).reshape(pieces, width)

        def add(i, lanes):
            piece = jax.lax.dynamic_index_in_dim(x_PxW, i, keepdims=False)
            hit_BxW = numbers_Bx1 == classify(piece[None], *grid)
            sums, counts = lanes
            return sums + jnp.where(hit_BxW, piece[None], 0.0), counts + hit_BxW.astype(jnp.float32)

        none = jnp.zeros((bins, width), jnp.float32)
        found = [jnp.sum(x, axis=1) for x in jax.lax.fori_loop(0, pieces, add, (none, none))]
        if rest:
            last = jax.lax.slice_in_dim(x_W, pieces * width, size)[None]
            last = _by_masks(last, classify, grid, bins)
            found = [a + b[0] for a, b in zip(found, last)]
        return tuple(found)

    return jax.lax.map(lambda xs: one(*xs), (x_GxW, *grid), batch_size=together)
