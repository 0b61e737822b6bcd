"""Cuts a stack of matrices into 1-D blocks (one scale each) and 2-D chunks (top-k), and back.

`to_blocks` also takes a leaf in windows (`row_sharding.InWindows`), of which each device of a
region holds whole blocks. `sent` and `received` convert such blocks to the payload and back.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.matrix import MatrixCodec, Shape
from lowcomm_jax.compression.row_sharding import InWindows, leaf_windows

SMALLEST = 1e-36  # below, a reciprocal overflows fp32; such values are sent as zero


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x for x >= 1e-36, else 0 (instead of inf)."""
    large = x >= SMALLEST
    return jnp.where(large, 1.0 / jnp.where(large, x, 1.0), 0.0)


def largest_magnitude(x_LxBxW: jax.Array) -> jax.Array:
    """max |x| over the last axis (from both ends: CPU compilers fuse those faster than |x|)."""
    return jnp.maximum(jnp.max(x_LxBxW, axis=-1), -jnp.min(x_LxBxW, axis=-1))


def largest_divisor(n: int, limit: int) -> int:
    """Largest divisor of n that is at most `limit`.

    >>> largest_divisor(768, 64), largest_divisor(50, 64), largest_divisor(134, 64)
    (64, 50, 2)
    """
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


SHORT_ROW = 16  # values; rows of fewer share blocks
PACKING_BLOCK = 256  # where codes are packed block by block, and there is no scale per block


class Blocks(NamedTuple):
    """`count` blocks of `width` values per matrix.

    With `by_row` every row has blocks of its own, the last of them padded. Else blocks are pieces
    of the flat matrix, of which the last ones may be padding.
    """

    count: int
    width: int
    by_row: bool = False


def cut(shape: Shape, block: int | None) -> Blocks:
    """Choose the blocks of a matrix: about `block` values each, a row each when None.

    In rows of 16 values or more, blocks lie inside rows, so that shards cut along rows hold whole
    blocks. A block is as wide as the largest divisor of M between block / 4 and block. Where there
    is none, a row gets as few equal blocks as fit (fewer padding values than blocks). Shorter rows
    are cut as one flat matrix.

    >>> cut((1, 8, 768), 256)[:2], cut((1, 3, 67), 64)[:2], cut((1, 9, 32), 256)[:2]
    ((24, 256), (6, 34), (9, 32))
    >>> cut((1, 100, 3), 64), cut((1, 3, 67), None)
    (Blocks(count=5, width=60, by_row=False), Blocks(count=3, width=67, by_row=True))
    """
    _, rows, columns = shape
    if block is None:
        return Blocks(rows, columns, by_row=True)
    width = largest_divisor(columns, block)
    if 4 * width >= block:
        return Blocks(rows * columns // width, width, by_row=True)
    by_row = columns >= SHORT_ROW
    size = columns if by_row else rows * columns
    each = -(-size // block)
    return Blocks(each * (rows if by_row else 1), -(-size // each), by_row)


def rows_together(shape: Shape, block: int | None) -> int:
    """Rows that share blocks: one where blocks lie inside rows, else all of them.

    >>> rows_together((1, 8, 768), 256), rows_together((1, 8, 3), 64)
    (1, 8)
    """
    return 1 if cut(shape, block).by_row else shape[1]


def unit(shape: Shape, blocks: Blocks) -> int:
    """Values of the flat matrix that a device must hold together: a block, or a padded row.

    >>> shape = (1, 100, 67)
    >>> unit(shape, cut(shape, 64)), unit((1, 9, 512), cut((1, 9, 512), 256))
    (67, 256)
    """
    _, rows, columns = shape
    padded = blocks.by_row and rows > 1 and columns % blocks.width
    return columns if padded else blocks.width


def to_blocks(x_LxNxM: jax.Array | InWindows, blocks: Blocks) -> jax.Array:
    """`[L, N, M]` -> `[L, count, width]`, padded by repeating the last value.

    Repeating keeps the range of an affine block; a zero could widen it. Of a leaf in windows every
    device has room for the same number of blocks: `count` is then that of all the room.
    """
    count, width, by_row = blocks
    if isinstance(x_LxNxM, InWindows):
        size = unit(x_LxNxM.shape, blocks)
        x = leaf_windows().to_units(x_LxNxM.flat, size)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -size % width)), mode="edge")
        return x.reshape(x.shape[0], -1, width)
    layers, rows, _ = x_LxNxM.shape
    pieces = rows if by_row else 1
    x = x_LxNxM.reshape(layers, pieces, -1)
    missing = count // pieces * width - x.shape[2]
    if missing:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing)), mode="edge")
    return x.reshape(layers, count, width)


def from_blocks(x_LxBxW: jax.Array, shape: Shape, by_row: bool) -> jax.Array | InWindows:
    """Inverse of `to_blocks`."""
    layers, rows, columns = shape
    if leaf_windows() is not None:
        size = unit(shape, Blocks(0, x_LxBxW.shape[2], by_row))
        x = x_LxBxW.reshape(x_LxBxW.shape[0], -1, size + -size % x_LxBxW.shape[2])
        return InWindows(leaf_windows().from_units(x[:, :, :size]), shape)
    pieces = rows if by_row else 1
    x = x_LxBxW.reshape(layers, pieces, -1)
    return x[:, :, : rows * columns // pieces].reshape(shape)


def sent(x_LxB: jax.Array, size: int, turned: bool = False) -> jax.Array:
    """The part of `[L, blocks, ...]` that travels; for a leaf in windows without its spare room.

    Args:
      size: values of a unit (`unit`).
      turned: see `Windows.drop_filling`.
    """
    return x_LxB if leaf_windows() is None else leaf_windows().drop_filling(x_LxB, size, turned)


def received(x_LxB: jax.Array, size: int, turned: bool = False) -> jax.Array:
    """Inverse of `sent`."""
    return x_LxB if leaf_windows() is None else leaf_windows().restore_filling(x_LxB, size, turned)


def real(shape: Shape, blocks: Blocks) -> jax.Array | None:
    """Which values of a leaf's blocks are its own, bool `[1, count, width]`.

    None of a leaf that is not in windows: all of them.
    """

    if leaf_windows() is None:
        return None
    size = unit(shape, blocks)
    filled = jnp.pad(leaf_windows().real(size), ((0, 0), (0, -size % blocks.width)))
    return filled.reshape(1, -1, blocks.width)


class InBlocks(MatrixCodec):
    """A codec that codes blocks of about `block` values, each by itself; None = a row each."""

    block: int | None
    requantizable = True
    layers_apart = True
    takes_windows = True

    def rows_together(self, shape):
        return rows_together(shape, self.block)

    def unit(self, shape):
        return unit(shape, cut(shape, self.block))


class Chunks(NamedTuple):
    """A matrix cut into `down` x `across` chunks of `height` x `width`, without padding."""

    down: int
    across: int
    height: int
    width: int

    @property
    def count(self) -> int:
        return self.down * self.across

    @property
    def size(self) -> int:
        return self.height * self.width


def tile(shape: Shape, block: int) -> Chunks:
    """Chunks with the largest divisor <= block of each dimension as sides (arXiv 2508.15706).

    >>> tile((1, 128, 96), 64), tile((1, 1, 96), 64)
    (Chunks(down=2, across=2, height=64, width=48), Chunks(down=1, across=2, height=1, width=48))
    """
    _, rows, columns = shape
    height, width = largest_divisor(rows, block), largest_divisor(columns, block)
    return Chunks(rows // height, columns // width, height, width)


def to_chunks(x_LxNxM: jax.Array, chunks: Chunks) -> jax.Array:
    """`[L, N, M]` -> `[L, down * across, height * width]`."""
    down, across, height, width = chunks
    split = x_LxNxM.reshape(-1, down, height, across, width).transpose(0, 1, 3, 2, 4)
    return split.reshape(-1, chunks.count, chunks.size)


def from_chunks(x_LxCxS: jax.Array, chunks: Chunks) -> jax.Array:
    """Inverse of `to_chunks`."""
    down, across, height, width = chunks
    split = x_LxCxS.reshape(-1, down, across, height, width).transpose(0, 1, 3, 2, 4)
    return split.reshape(-1, down * height, across * width)
