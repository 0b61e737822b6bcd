"""Narrow integers in bytes: 1, 2, 4 and 12 bits, along the last axis; 8 bits stay as they are.

Of 12 bits two codes share three bytes. Otherwise a row of W codes is cut into planes of equal
length: two planes of 4-bit codes, four of 2-bit, eight of 1-bit. Byte j holds code j of every
plane. Neighbours stay neighbours, so that packing is plain vector arithmetic without strides. The
last plane is padded with zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def packed_width(width: int, bits: int) -> int:
    """Bytes of a row of `width` codes.

    >>> packed_width(7, 4), packed_width(7, 2), packed_width(9, 1), packed_width(5, 12)
    (4, 2, 2, 9)
    """
    if bits == 12:
        return 3 * -(-width // 2)
    return -(-width // (8 // bits))


def _planes(codes: jax.Array, count: int) -> jax.Array:
    """`[..., W]` -> `[..., count, ceil(W / count)]`, zero-padded."""
    *lead, width = codes.shape
    each = -(-width // count)
    if each * count != width:
        codes = jnp.pad(codes, [(0, 0)] * len(lead) + [(0, each * count - width)])
    return codes.reshape(*lead, count, each)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Pack unsigned codes below 2**bits into uint8.

    Args:
      codes: `[..., W]`, uint8 (uint16 for 12 bits).
      bits: 1, 2, 4, 8 or 12.

    Returns:
      uint8 `[..., packed_width(W, bits)]`.

    Raises:
      ValueError: other `bits`.
    """
    if bits not in (1, 2, 4, 8, 12):
        raise ValueError(f"bits={bits}: use 1, 2, 4, 8 or 12; for 3, pack 2 and 1 of them apart")
    if bits == 8:
        return codes
    if bits == 12:
        return _pack12(codes)
    planes = _planes(codes, 8 // bits)
    packed = planes[..., 0, :]
    for i in range(1, 8 // bits):
        packed = packed | (planes[..., i, :] << jnp.uint8(i * bits))
    return packed


def unpack(packed: jax.Array, bits: int, width: int) -> jax.Array:
    """Inverse of `pack`: uint8 codes `[..., width]` (uint16 for 12 bits)."""
    if bits == 8:
        return packed
    if bits == 12:
        return _unpack12(packed, width)
    lead = packed.shape[:-1]
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    shape = (1,) * len(lead)
    planes = (packed[..., None, :] >> shifts.reshape(*shape, -1, 1)) & jnp.uint8(2**bits - 1)
    return planes.reshape(*lead, -1)[..., :width]


def _pack12(codes: jax.Array) -> jax.Array:
    """Two codes in three bytes: low bytes of both planes, then their high nibbles."""
    planes = _planes(codes, 2)
    low = (planes & jnp.uint16(255)).astype(jnp.uint8)
    high = (planes >> jnp.uint16(8)).astype(jnp.uint8)
    both = high[..., :1, :] | (high[..., 1:, :] << jnp.uint8(4))
    return jnp.concatenate([low, both], axis=-2).reshape(*codes.shape[:-1], -1)


def _unpack12(packed: jax.Array, width: int) -> jax.Array:
    *lead, size = packed.shape
    rows = packed.reshape(*lead, 3, size // 3).astype(jnp.uint16)
    both = rows[..., 2, :]
    first = rows[..., 0, :] | ((both & jnp.uint16(15)) << jnp.uint16(8))
    second = rows[..., 1, :] | ((both >> jnp.uint16(4)) << jnp.uint16(8))
    return jnp.stack([first, second], axis=-2).reshape(*lead, -1)[..., :width]
