"""Sums and counts per bin of a quantiser, formulated for the platform at hand."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lowcomm_jax.inside import axes_inside

PIECE = 4096  # values per matrix product: their one-hot rows stay in a CPU core's cache


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

    # A CPU compiler writes the masks out in full, but is quick at small matrix products; elsewhere
    # one fused pass over the masks is fastest, and it leaves sharded values where they are.
    if axes_inside():
        return _by_masks(x_GxW, classify, grid, bins)

    def by_products(x, *grid):
        return _by_products(x, classify, grid, bins)

    def by_masks(x, *grid):
        return _by_masks(x, classify, grid, bins)

    return jax.lax.platform_dependent(x_GxW, *grid, cpu=by_products, default=by_masks)


def _by_masks(x_GxW, classify, grid, bins):
    codes = classify(x_GxW, *grid)
    masks = [codes == b for b in range(bins)]
    sums = [jnp.sum(jnp.where(m, x_GxW, 0.0), axis=1) for m in masks]
    counts = [jnp.sum(m.astype(jnp.float32), axis=1) for m in masks]
    return jnp.stack(sums, axis=1), jnp.stack(counts, axis=1)


def _by_products(x_GxW, classify, grid, bins):
    """One-hot of (bin // 4) times one-hot of (bin % 4), contracted over the values."""
    groups, size = x_GxW.shape
    pieces, rest = divmod(size, PIECE)
    parts = []
    if pieces:
        body = x_GxW[:, : pieces * PIECE].reshape(groups * pieces, 1, PIECE)
        spread = [jnp.repeat(g, pieces, axis=0)[:, None] for g in grid]
        parts.append(_each_product(body, classify, spread).reshape(groups, -1, 2, 16))
    if rest:
        body = x_GxW[:, None, pieces * PIECE :]
        parts.append(_each_product(body, classify, [g[:, None] for g in grid])[:, None])
    total = jnp.sum(jnp.concatenate(parts, axis=1), axis=1)
    return total[:, 0, :bins], total[:, 1, :bins]


def _each_product(x_Px1xW, classify, grid):
    """Sums and counts of every piece, one after the other: `[P, 2, 16]`."""
    # Always 4 x 4: the product kernels are no faster for fewer bins, and slow for 2 x 2.
    digits = jnp.arange(4, dtype=jnp.float32)[:, None]

    def one(piece):
        x_1xW, *own = piece
        codes = classify(x_1xW, *own)
        high = jnp.floor(codes * 0.25)
        rows = (digits == high).astype(jnp.float32)
        columns = (digits == codes - 4.0 * high).astype(jnp.float32).T
        exact = jax.lax.Precision.HIGHEST
        sums = jnp.matmul(rows * x_1xW, columns, precision=exact)
        counts = jnp.matmul(rows, columns, precision=exact)
        return jnp.stack([sums.reshape(-1), counts.reshape(-1)])

    return jax.lax.map(one, (x_Px1xW, *grid))
