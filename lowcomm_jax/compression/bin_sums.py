"""Sums and counts per bin of a quantiser, formulated for the platform at hand."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lowcomm_jax.inside import axes_inside

LANES = 1 << 19  # sums that are added to side by side: they stay in a CPU's cache
LEAST = 32  # lanes of a group


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

    # A CPU compiler writes the masks out in full; elsewhere one fused pass over the masks is
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
    """Piece by piece into lanes of their own, which are added up at the end: elementwise all along,
    so that a CPU's cores and vector units share it.
    """
    groups, size = x_GxW.shape
    together = min(groups, LANES // (bins * LEAST))
    width = min(size, LANES // (bins * together))
    numbers_Bx1 = jnp.arange(bins, dtype=jnp.float32)[:, None]

    def one(x_W, *own):
        grid = [g[None] for g in own]

        def add(i, lanes):
            piece = jax.lax.dynamic_slice_in_dim(x_W, i * width, width)
            hit_BxW = numbers_Bx1 == classify(piece[None], *grid)
            sums, counts = lanes
            return sums + jnp.where(hit_BxW, piece[None], 0.0), counts + hit_BxW.astype(jnp.float32)

        pieces, rest = divmod(size, width)
        none = jnp.zeros((bins, width), jnp.float32)
        found = [jnp.sum(x, axis=1) for x in jax.lax.fori_loop(0, pieces, add, (none, none))]
        if rest:
            last = _by_masks(x_W[None, pieces * width :], classify, grid, bins)
            found = [a + b[0] for a, b in zip(found, last)]
        return tuple(found)

    return jax.lax.map(lambda xs: one(*xs), (x_GxW, *grid), batch_size=together)
