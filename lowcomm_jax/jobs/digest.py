"""Anchor digests: jobs whose anchors have parted must notice before they part further."""

from __future__ import annotations

import logging
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange.between.office import Heal

log = logging.getLogger(__name__)
_ODD = (0x9E3779B1, 0x85EBCA77)  # large odd multipliers, so that every bit of an element counts


class AnchorsDifferError(RuntimeError):
    """Regions that must have the same anchor have not; the message gives every region's digest.

    Attributes:
      heals: other regions go on; this one can come back and take their state.
    """

    def __init__(self, message: str, heals: bool):
        super().__init__(message)
        self.heals = heals


@jax.jit
def anchor_digest(anchor: dict[str, jax.Array]) -> jax.Array:
    """Digest of a fragment's anchor, uint32 `[2]`, equal where all bits are.

    Two sums modulo 2^32 over all elements of (bits + position) mixed with a multiplier: any single
    element that differs changes them. Integer sums do not depend on their order, so that the
    digest is the same on every mesh. It guards against accidents, not against forgery.

    Args:
      anchor: float32 leaves by name, any shapes.
    """
    total = jnp.zeros(2, jnp.uint32)
    for number, name in enumerate(sorted(anchor)):
        bits = jax.lax.bitcast_convert_type(anchor[name].astype(jnp.float32), jnp.uint32)
        place = _places(bits.shape) + jnp.uint32(number * _ODD[1] & 0xFFFFFFFF)
        sums = [jnp.sum(_mixed(bits, place, odd), dtype=jnp.uint32) for odd in _ODD]
        total = total + jnp.stack(sums)
    return total


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


def compare(
    key: str, digest_Rx2: np.ndarray, counted_R: np.ndarray, region: int | None, heal: Heal
) -> np.ndarray:
    """Refuse to land on an anchor that is not the one that holds.

    Args:
      digest_Rx2: every region's digest at the send; counted_R: bool `[R]`, whose are known.
      region: which one we are; None = one that only listens.
      heal: which anchor holds where they differ; see `exchange.store`.

    Returns:
      bool `[R]`: those that count, whose anchor holds. What the others did was done from another.

    Raises:
      AnchorsDifferError: with the digests; ours does not hold, or none does.
    """
    known = _known(digest_Rx2, counted_R)
    if len(set(known.values())) < 2:
        return counted_R
    holds = _holding(known, heal)
    listed = ", ".join(f"region {r}: {text}" for r, text in known.items())
    message = f"the anchors differ at {key}: {listed}"
    if holds is None or (region is not None and known.get(region) != holds):
        raise AnchorsDifferError(message, heals=holds is not None)
    log.warning("%s; this region goes on", message)
    return counting(digest_Rx2, counted_R, heal)


def counting(digest_Rx2: np.ndarray, counted_R: np.ndarray, heal: Heal) -> np.ndarray:
    """What `compare` returns in the regions where it does not raise; never raises itself."""
    known = _known(digest_Rx2, counted_R)
    holds = _holding(known, heal) if len(set(known.values())) > 1 else None
    if holds is None:
        return counted_R
    return np.array([known.get(r) == holds for r in range(len(counted_R))])


def _known(digest_Rx2: np.ndarray, counted_R: np.ndarray) -> dict[int, str]:
    """Digests in hex, of the regions that are counted."""
    return {int(r): f"{a:08x}{b:08x}" for r, (a, b) in enumerate(digest_Rx2) if counted_R[r]}


def _holding(known: dict[int, str], heal: Heal) -> str | None:
    """The digest that holds; None = none does."""
    if heal == "lowest":
        return known[min(known)]
    digest, votes = Counter(known.values()).most_common(1)[0]
    return digest if heal == "majority" and 2 * votes > len(known) else None
