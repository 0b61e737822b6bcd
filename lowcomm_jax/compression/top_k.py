r"""Send the k largest values of every chunk, with packed indices.

`TopK` cuts a matrix into chunks of up to 64 x 64: the largest divisor <= 64 of each dimension. A
vector is cut into chunks of up to 64. Each chunk sends its k values of largest magnitude and where
they stand: 12 bits each, two in three bytes (8 bits in chunks of up to 256). Chunks of at most k
values travel whole, without indices. Inside a region, devices code whole rows of chunks, or whole
columns of them (`windows.cut_strips`).

Error: that of `values` for a value that is kept; the value itself for one that is not, which is at
most the smallest magnitude kept in its chunk.

Source: SparseLoCo, arXiv 2508.15706 (k = 64; values then quantised to 2 bits); chunks as in DeMo,
arXiv 2411.19870.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.compression import blocks as cutting
from lowcomm_jax.compression import nested_values, windows
from lowcomm_jax.compression.base import fold_regions
from lowcomm_jax.compression.blocks import Blocks, Chunks
from lowcomm_jax.compression.cast import FP32
from lowcomm_jax.compression.matrix import Leaf, MatrixCodec, PyTree, Shape
from lowcomm_jax.compression.packing import pack, packed_width, unpack
from lowcomm_jax.compression.row_sharding import InWindows, axes_inside, leaf_windows, on_rows
from lowcomm_jax.refused import in_range, one_of, refuse

BAND = 2**18  # values in a band, at least


@dataclasses.dataclass(frozen=True)
class TopK(MatrixCodec):
    """Keep k values per chunk and code them with `values`.

    Attributes:
      k: values kept per chunk.
      block: largest side of a chunk, at most 64.
      values: codec of the kept values (`[L, chunks, k]`, in order of magnitude).
      mean: over all `regions` of a round (arXiv 2508.15706), or per entry over its `senders`
        (arXiv 2411.19870).

    Raises:
      ValueError: a setting out of range.
    """

    k: int = 64
    block: int = 64
    values: MatrixCodec = FP32
    mean: Literal["regions", "senders"] = "regions"
    takes_windows = True

    def __post_init__(self) -> None:
        refuse(
            type(self).__name__,
            [
                in_range("k", self.k, 1, float("inf")),
                in_range("block", self.block, 1, 64),
                one_of("mean", self.mean, ("regions", "senders")),
            ],
        )

    @property
    def layers_apart(self) -> bool:
        return self.values.layers_apart

    @property
    def name(self) -> str:
        return f"topk{self.k}" + ("" if self.values == FP32 else f"_{self.values.name}")

    def init(self, shape: Shape, seed: int) -> PyTree:
        chunks = cutting.tile(shape, self.block)
        return self.values.init(self._kept(shape, chunks), seed)

    def _kept(self, shape: Shape, chunks: Chunks) -> Shape:
        return shape[0], chunks.count, min(self.k, chunks.size)

    def encode(self, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        shape, chunks = x_LxNxM.shape, self._chunks(x_LxNxM.shape)
        # A leaf in windows comes with spare rows.
        if self._in_strips(shape):
            rows = windows.cut_strips(leaf_windows(), x_LxNxM.flat, shape, chunks.width)
        else:
            rows = cutting.to_blocks(x_LxNxM, _bands(chunks))
        rows = rows.reshape(rows.shape[0], -1, chunks.across * chunks.width)
        kept = _on_rows(lambda x: self._choose(x, chunks), chunks, chunks.height, rows)
        kept = {k: cutting.sent(x, *self._units(shape)) for k, x in kept.items()}
        values, state = nested_values.encode(self.values, kept.pop("values"), state)
        return {"values": values, **kept}, state

    def _choose(self, x_LxNxM: jax.Array, chunks: Chunks) -> dict[str, jax.Array]:
        """Kept values `[L, chunks, k]` and packed indices of some rows of chunks."""
        chunks = chunks._replace(down=x_LxNxM.shape[1] // chunks.height)
        x_LxCxS = self._forward(cutting.to_chunks(x_LxNxM, chunks), chunks)
        if chunks.size <= self.k:
            return {"values": x_LxCxS}
        # Exact at recall 1, like `top_k`, but faster on some accelerators.
        index = jax.lax.approx_max_k(jnp.abs(x_LxCxS), self.k, recall_target=1.0)[1]
        kept = jnp.take_along_axis(x_LxCxS, index, axis=-1, mode="promise_in_bounds")
        bits = _index_bits(chunks)
        narrow = index.astype(jnp.uint8 if bits == 8 else jnp.uint16)
        return {"values": kept, "index": pack(narrow, bits)}

    def decode(self, payload: PyTree, shape: Shape) -> Leaf:
        chunks = cutting.tile(shape, self.block)
        at, values, chunks = self._kept_of(payload, shape)
        placed = self._on_chunks(
            lambda kept: self._back(_place(kept, chunks), chunks), at, values, chunks
        )
        return self._joined(placed, shape, chunks)

    def aggregate(self, payload_R: PyTree, weight_R: jax.Array, shape: Shape) -> Leaf:
        if self.mean == "regions":
            return super().aggregate(payload_R, weight_R, shape)
        chunks = self._chunks(shape)

        def term(r):
            weight = weight_R[r]
            at, values, _ = self._kept_of(jax.tree.map(lambda x: x[r], payload_R), shape)
            values = jnp.where(weight > 0, values * weight, 0.0)
            sent = jnp.broadcast_to(jnp.maximum(weight, 0.0), values.shape)

            def place(x):
                return self._on_chunks(lambda kept: _place(kept, chunks), at, x, chunks)

            return place(values), place(sent)

        total, weight = fold_regions(term, weight_R.shape[0])
        mean = jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)
        mean = _on_rows(lambda rows: self._back(rows, chunks), chunks, 1, mean)
        return self._joined(mean, shape, chunks)

    def _kept_of(self, payload, shape: Shape) -> tuple[dict, jax.Array, Chunks]:
        """The indices, values and chunks of a payload; every device gets those of its own rows."""
        chunks, units = self._chunks(shape), self._units(shape)
        values = nested_values.decode(self.values, payload["values"], self._kept(shape, chunks))
        at = {k: cutting.received(x, *units) for k, x in payload.items() if k == "index"}
        return at, cutting.received(values, *units), chunks

    def _chunks(self, shape: Shape) -> Chunks:
        """The chunks of a leaf; those of a vector, and of strips, lie one below the other."""
        chunks = cutting.tile(shape, self.block)
        below = shape[1] == 1 or self._in_strips(shape)
        return chunks._replace(down=chunks.count, across=1) if below else chunks

    def _in_strips(self, shape: Shape) -> bool:
        """Whether devices hold columns of chunks, because there are too few rows of them."""
        return leaf_windows() is not None and not self._has_rows(shape, leaf_windows().devices)

    def _has_rows(self, shape: Shape, devices: int) -> bool:
        return cutting.tile(shape, self.block).down >= devices

    def _units(self, shape: Shape) -> tuple[int, bool]:
        """(values of a unit that one device holds whole, whether chunks travel by column)."""
        if self._in_strips(shape):
            return shape[1] * cutting.tile(shape, self.block).width, True
        return self.unit(shape), False

    def _joined(self, rows: jax.Array, shape: Shape, chunks: Chunks) -> jax.Array | InWindows:
        """The leaf from its rows of chunks."""
        if self._in_strips(shape):
            found = rows.reshape(rows.shape[0], -1, shape[1], chunks.width)
            return InWindows(windows.join_strips(leaf_windows(), found, shape), shape)
        bands = rows.reshape(rows.shape[0], -1, _bands(chunks).width)
        return cutting.from_blocks(bands, shape, by_row=False)

    def _on_chunks(self, fn, payload, values_LxCxK: jax.Array, chunks: Chunks) -> jax.Array:
        """`fn` of the kept values and indices of some rows of chunks."""
        return _on_rows(fn, chunks, chunks.across, payload | {"values": values_LxCxK})

    def sends_all(self, shape: Shape) -> bool:
        return cutting.tile(shape, self.block).size <= self.k

    def rows_together(self, shape: Shape) -> int:
        return cutting.tile(shape, self.block).height

    def unit(self, shape: Shape) -> int:
        return _bands(cutting.tile(shape, self.block)).width

    def splits_over(self, shape: Shape, devices: int) -> bool:
        if self._has_rows(shape, devices):
            return super().splits_over(shape, devices)
        return windows.strips_work(shape, cutting.tile(shape, self.block).width, devices)

    def nbytes(self, shape: Shape) -> int:
        chunks = cutting.tile(shape, self.block)
        values = self.values.nbytes(self._kept(shape, chunks))
        if chunks.size <= self.k:
            return values
        return values + shape[0] * chunks.count * packed_width(self.k, _index_bits(chunks))

    def _forward(self, x_LxCxS: jax.Array, chunks: Chunks) -> jax.Array:
        """Into the domain in which the largest are chosen."""
        return x_LxCxS

    def _back(self, rows: jax.Array, chunks: Chunks) -> jax.Array:
        """From rows of chunks (see `_place`) to `[L, N, M]`."""
        return rows.reshape(rows.shape[0], -1, rows.shape[-1])


def _on_rows(fn, chunks: Chunks, each: int, tree):
    """`fn` on every device's rows of chunks; `each` of the n in leaves `[L, n, ...]` make a row."""
    values, n = chunks.across * chunks.size, jax.tree.leaves(tree)[0].shape[1]
    return on_rows(lambda own, _: in_bands(fn, each, values, own), n // each, tree)


def _bands(chunks: Chunks) -> Blocks:
    """Rows of chunks as blocks of the flat matrix."""
    return Blocks(chunks.down, chunks.across * chunks.size)


def _index_bits(chunks: Chunks) -> int:
    return 8 if chunks.size <= 256 else 12


def _place(kept, chunks: Chunks) -> jax.Array:
    """Put the kept values where they stand, 0 elsewhere: `[L, down, height, across * width]`.

    The scatter goes straight into rows of the matrix. A scatter into chunks would need a transposed
    copy of the whole matrix afterwards.
    """

    values_LxCxK = kept["values"]
    layers, count, k = values_LxCxK.shape
    chunks = chunks._replace(down=count // chunks.across)
    down, across, height, width = chunks
    out_shape = (layers, down, height, across * width)
    if "index" not in kept:
        return cutting.from_chunks(values_LxCxK, chunks).reshape(out_shape)
    index = unpack(kept["index"], _index_bits(chunks), k).astype(jnp.int32)
    index = index.reshape(layers * down, across, k)
    chunk = jnp.arange(across, dtype=jnp.int32)[None, :, None]
    at = (index // width) * (across * width) + chunk * width + index % width
    blank = jnp.zeros((layers * down, math.prod(out_shape[2:])), jnp.float32)

    def scatter(row, where, values):
        # "drop": an absent region's payload may hold anything.
        return row.at[where].set(values, mode="drop", unique_indices=True)

    values = values_LxCxK.reshape(layers * down, across * k)
    placed = jax.vmap(scatter)(blank, at.reshape(layers * down, across * k), values)
    return placed.reshape(out_shape)


# Bands: on a CPU, rows are coded some at a time, so that what lies between the steps of a function
# stays in a cache.


def in_bands(fn: Callable[[PyTree], PyTree], each: int, values: int, tree: PyTree) -> PyTree:
    """`fn(tree)`; a CPU runs it on one band of rows at a time and copies no whole matrix.

    Args:
      fn: maps leaves `[L, n, ...]` to such leaves, each row by itself.
      each: how many of the n make up one row.
      values: number of values in one row, before or after coding.
    """
    layers, n = jax.tree.leaves(tree)[0].shape[:2]
    bands = _row_bands(n // each, values)

    def one(band):
        return jax.tree.map(lambda y: y[0], fn(jax.tree.map(lambda x: x[None], band)))

    def banded(tree):
        # Without an axis of length 1, for which a CPU compiler would copy everything.
        cut = jax.tree.map(lambda x: x.reshape(layers * bands, -1, *x.shape[2:]), tree)
        done = jax.lax.map(one, cut)
        return jax.tree.map(lambda y: y.reshape(layers, -1, *y.shape[2:]), done)

    if layers * bands == 1 or axes_inside():
        return fn(tree)
    return jax.lax.platform_dependent(tree, cpu=banded, default=fn)


def _row_bands(rows: int, values: int) -> int:
    """The largest number of equal bands that hold at least `BAND` values each; else 1.

    >>> _row_bands(64, 2**18), _row_bands(64, 2**17), _row_bands(7, 2**17), _row_bands(4, 2**10)
    (64, 32, 1, 1)
    """
    fitting = (b for b in range(rows, 0, -1) if rows % b == 0 and rows // b * values >= BAND)
    return next(fitting, 1)
