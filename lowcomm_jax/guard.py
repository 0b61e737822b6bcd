"""Which contributions count in a mean, and how far an anchor may move."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Guard:
    """Contributions that are not finite are always left out.

    Attributes:
      outlier_factor: leave out a region whose pseudo-gradient norm exceeds this multiple of the
        median over regions; None = off. With two regions the median is their mean, so that a
        factor of 2 or more never applies.
      max_update_norm: clip the outer update to this global norm per fragment; None = off.
    """

    outlier_factor: float | None = None
    max_update_norm: float | None = None

    def violations(self) -> list[str]:
        problems = []
        factor, norm = self.outlier_factor, self.max_update_norm
        if factor is not None and not (math.isfinite(factor) and factor > 1):
            problems.append(f"outlier_factor={factor}: must exceed 1")
        if norm is not None and not (math.isfinite(norm) and norm > 0):
            problems.append(f"max_update_norm={norm}: must be positive")
        return problems

    def accepts(self, norm_R: jax.Array, takes_part_R: jax.Array) -> jax.Array:
        """Bool `[R]`: participants whose contribution of this norm counts."""
        accepted = takes_part_R & jnp.isfinite(norm_R)
        if self.outlier_factor is None:
            return accepted
        median = jnp.nanmedian(jnp.where(accepted, norm_R, jnp.nan))
        return accepted & (norm_R <= self.outlier_factor * median)

    def clip(self, updates: PyTree) -> tuple[PyTree, jax.Array]:
        """Scale updates `[A, ...]` down to the allowed norm; returns (updates, norms `[A]`)."""
        norm = norm_per_row(updates)
        if self.max_update_norm is None:
            return updates, norm
        scale = jnp.minimum(1.0, self.max_update_norm / jnp.maximum(norm, 1e-30))
        clipped = jax.tree.map(lambda u: u * scale.reshape(-1, *(1,) * (u.ndim - 1)), updates)
        return clipped, norm * scale


def norm_per_row(tree_R: dict[str, jax.Array]) -> jax.Array:
    """L2 norm over all leaves behind the leading axis, fp32 `[R]`."""
    # No reshape: it would gather leaves that are sharded inside a region.
    squares = [jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim))) for x in tree_R.values()]
    return jnp.sqrt(sum(squares))


def select(mask_R: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Per region: `new` where the mask holds, else `old`."""

    def pick(a, b):
        return jnp.where(mask_R.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)
