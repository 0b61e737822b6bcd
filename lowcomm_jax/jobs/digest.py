"""Anchor digests: jobs whose anchors have parted must notice before they part further."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lowcomm_jax.fragments import take
from lowcomm_jax.offload import fetch

_ODD = (0x9E3779B1, 0x85EBCA77)  # large odd multipliers, so that every bit of an element counts


@jax.jit
def fragment_digest(leaves: dict[str, jax.Array], rows: dict[str, jax.Array]) -> jax.Array:
    """Digest of a fragment's anchor, uint32 `[2]`, equal where all bits are.

    Two sums modulo 2^32 over all elements of (bits + position) mixed with a multiplier: any single
    element that differs changes them. Integer sums do not depend on their order, so that the
    digest is the same on every mesh. It guards against accidents, not against forgery.

    Args:
      leaves: float32 by name, `[A, ...]`; rows: see `Fragments.rows`.
    """
    total = jnp.zeros(2, jnp.uint32)
    for number, name in enumerate(sorted(leaves)):
        # One at a time, where they are offloaded.
        leaf = take({name: fetch(leaves[name])}, rows)[name]
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
        place = _places(bits.shape) + jnp.uint32(number * _ODD[1] & 0xFFFFFFFF)
        sums = [jnp.sum(_mixed(bits, place, odd), dtype=jnp.uint32) for odd in _ODD]
        total = total + jnp.stack(sums)
    return total


@jax.jit
def together(digests: list[jax.Array]) -> jax.Array:
    """One digest of those of all fragments, in their order, uint32 `[2]`."""
    numbers = jnp.arange(len(digests), dtype=jnp.uint32)[:, None]
    return jnp.sum(_mixed(jnp.stack(digests), numbers, _ODD[0]), 0, jnp.uint32)


def _places(shape: tuple[int, ...]) -> jax.Array:
    """Row-major number of every element modulo 2^32, uint32; without a reshape, which would gather
    leaves that are sharded inside a region."""
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place + along * jnp.uint32(stride & 0xFFFFFFFF)
        stride *= shape[axis]
    return place


def _mixed(bits: jax.Array, place: jax.Array, odd: int) -> jax.Array:
    """One to one in `bits` for a given place: adding, multiplying by an odd number and folding the
    high bits into the low ones can all be undone."""
    x = (bits + place * jnp.uint32(_ODD[0])) * jnp.uint32(odd)
    return (x ^ (x >> 15)) * jnp.uint32(_ODD[1])
