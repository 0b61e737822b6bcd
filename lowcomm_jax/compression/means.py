"""Means over regions in their order, and values of which every use sees the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def as_rounded(tree: PyTree) -> PyTree:
    """The same fp32 values, of which every use sees the same bits; NaN for what is not finite.

    A compiler may compute a value anew for each of its uses, and make its last product and a sum
    that follows one rounding: two uses then differ in the last bit. Codes and codebooks that were
    made of values that differ so do not fit one another. A product is not joined with a sum through
    a select. (`jax.lax.optimization_barrier` does not prevent it: on CPUs the joining comes later.)
    """
    return jax.tree.map(lambda x: jnp.where(jnp.abs(x) < jnp.inf, x, jnp.nan), tree)


def weighted_mean(
    decode: Callable[[PyTree], PyTree], payload_R: PyTree, weight_R: jax.Array
) -> PyTree:
    """Decode one region at a time and average in region order (see `Codec.aggregate`)."""
    total = ordered_sum(decode, payload_R, weight_R)
    weight = fold_regions(lambda r: weight_R[r], weight_R.shape[0])
    scale = jnp.where(weight > 0, 1.0 / jnp.where(weight > 0, weight, 1.0), 0.0)
    return jax.tree.map(lambda x: x * scale, total)


def ordered_sum(
    decode: Callable[[PyTree], PyTree], payload_R: PyTree, weight_R: jax.Array
) -> PyTree:
    """Sum over regions of weight * decode(payload), one region after the other."""

    def term(r):
        one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, r, keepdims=False), payload_R)
        weight = weight_R[r]
        return jax.tree.map(lambda x: jnp.where(weight > 0, x * weight, 0.0), decode(one))

    return fold_regions(term, weight_R.shape[0])


def fold_regions(term: Callable[[Any], PyTree], regions: int) -> PyTree:
    """term(0) + term(1) + ... in this order, with one term in memory at a time."""

    def add(r, total):
        return jax.tree.map(jnp.add, total, term(r))

    # The first term is the start of the sum, not a zero: under shard_map it carries the right type.
    return jax.lax.fori_loop(1, regions, add, term(jnp.int32(0)))
