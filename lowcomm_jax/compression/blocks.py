"""Cutting a stack of matrices into 1-D blocks (one scale each) and 2-D chunks (top-k)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.matrix import Shape

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


class Blocks(NamedTuple):
    """`count` blocks of `width` values per matrix; the last ones may be padding."""

    count: int
    width: int


def cut(shape: Shape, block: int | None) -> Blocks:
    """Choose the blocks of a matrix: about `block` values each, a row each when None.

    Blocks lie inside rows when a divisor of M between block / 4 and block exists, so that shards
    cut along rows hold whole blocks; otherwise equal pieces of the flat matrix (fewer padding
    values than blocks).

    >>> cut((1, 8, 768), 256), cut((1, 3, 67), 64), cut((1, 3, 67), None)
    (Blocks(count=24, width=256), Blocks(count=4, width=51), Blocks(count=3, width=67))
    """
    _, rows, columns = shape
    if block is None:
        return Blocks(rows, columns)
    width = largest_divisor(columns, block)
    if 4 * width >= block:
        return Blocks(rows * columns // width, width)
    size = rows * columns
    count = -(-size // block)
    return Blocks(count, -(-size // count))


def rows_together(shape: Shape, block: int | None) -> int:
    """Rows that share blocks: one where blocks lie inside rows, else all of them.

    >>> rows_together((1, 8, 768), 256), rows_together((1, 3, 67), 64)
    (1, 3)
    """
    _, rows, columns = shape
    return 1 if columns % cut(shape, block).width == 0 else rows


def to_blocks(x_LxNxM: jax.Array, blocks: Blocks) -> jax.Array:
    """`[L, N, M]` -> `[L, count, width]`, padded by repeating the last value.

    Repeating keeps the range of an affine block; a zero could widen it.
    """
    flat = x_LxNxM.reshape(x_LxNxM.shape[0], -1)
    missing = blocks.count * blocks.width - flat.shape[1]
    if missing:
        flat = jnp.pad(flat, ((0, 0), (0, missing)), mode="edge")
    return flat.reshape(-1, *blocks)


def from_blocks(x_LxBxW: jax.Array, shape: Shape) -> jax.Array:
    """Inverse of `to_blocks`."""
    layers, rows, columns = shape
    return x_LxBxW.reshape(layers, -1)[:, : rows * columns].reshape(shape)


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
