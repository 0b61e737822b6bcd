"""Sums and counts per bin of a quantiser, formulated for the platform at hand."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lowcomm_jax.inside import axes_inside

ONE_HOT = 16384  # fp32 values of a piece's one-hot rows: they stay in a CPU core's cache


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
    """Rows of ones where a value is in the bin, times the values; added up piece by piece."""
    groups, size = x_GxW.shape
    width = ONE_HOT // max(bins, 4)
    pieces, rest = divmod(size, width)
    parts = []
    if pieces:
        body = x_GxW[:, : pieces * width].reshape(groups * pieces, width)
        spread = [jnp.repeat(g[:, 0], pieces) for g in grid]
        parts.append(_each_product(body, classify, spread, bins).reshape(groups, -1, 2, bins))
    if rest:
        body = x_GxW[:, pieces * width :]
        parts.append(_each_product(body, classify, [g[:, 0] for g in grid], bins)[:, None])
    total = jnp.sum(jnp.concatenate(parts, axis=1), axis=1)
    return total[:, 0], total[:, 1]


def _each_product(x_PxW, classify, grid, bins):
    """Sums and counts of every piece, one after the other: `[P, 2, bins]`.

    With an axis of length 1 between P and W, a CPU compiler would copy all values first.
    """
    numbers_Bx1 = jnp.arange(bins, dtype=jnp.float32)[:, None]

    def one(piece):
        x_W, *own = piece
        hit_BxW = (numbers_Bx1 == classify(x_W, *own)[None]).astype(jnp.float32)
        sums = jnp.matmul(hit_BxW, x_W, precision=jax.lax.Precision.HIGHEST)
        return jnp.stack([sums, jnp.sum(hit_BxW, axis=1)])

    return jax.lax.map(one, (x_PxW, *grid))
