"""The k largest values of every unit, and where they stand in it.

An index takes 12 bits, two in three bytes; in units of at most 256 values it takes 8.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.packing import pack, unpack
from lowcomm_jax.compression.units import flat

_LARGEST = 1 << 22  # values of the units that are sorted at once: a sort needs room


def choose(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """(values, packed indices) of the k largest magnitudes of each unit, the largest first.

    Args:
      x: fp32 `[L, down, across, height, width]`, more than k and at most 4096 values a unit.

    Returns:
      fp32 `[L, down, across, k]`, and uint8 `[L, down, across, bytes]`.
    """
    bits = _bits(math.prod(x.shape[3:]))

    def of_unit(x):
        # Exact at recall 1, like `top_k`, but faster on some accelerators.
        index = jax.lax.approx_max_k(jnp.abs(x), k, recall_target=1.0)[1]
        kept = jnp.take_along_axis(x, index, axis=-1, mode="promise_in_bounds")
        return kept, pack(index.astype(jnp.uint8 if bits == 8 else jnp.uint16), bits)

    units = flat(x).reshape(math.prod(x.shape[:3]), -1)
    bands = -(-units.size // _LARGEST)
    if bands > 1:
        chosen = jax.lax.map(of_unit, units, batch_size=-(-units.shape[0] // bands))
    else:
        chosen = jax.vmap(of_unit)(units)
    kept, index = (y.reshape(*x.shape[:3], -1) for y in chosen)
    return kept, index


def put_back(kept: jax.Array, packed: jax.Array | None, unit: tuple[int, int]) -> jax.Array:
    """Values where they stand in their units, and zeros elsewhere: inverse of `choose`.

    Args:
      kept: `[L, down, across, k]`.
      packed: indices of `choose`; None = all values of the unit, in their order.
      unit: (height, width).
    """
    layers, down, across, k = kept.shape
    height, width = unit
    if packed is None:
        return kept.reshape(layers, down, across, height, width)
    index = unpack(packed, _bits(height * width), k).astype(jnp.int32)
    # Straight into rows of the matrix: a CPU would copy it all once more to get them out of units.
    at = index // width * (across * width) + index % width
    at = at + width * jnp.arange(across, dtype=index.dtype).reshape(1, 1, -1, 1)

    def scatter(at, values):
        # "drop": an absent region's payload may hold anything.
        zeros = jnp.zeros(height * across * width)
        return zeros.at[at].set(values, mode="drop", unique_indices=True)

    rows = jax.vmap(scatter)(at.reshape(-1, across * k), kept.reshape(-1, across * k))
    return rows.reshape(layers, down, height, across, width).swapaxes(2, 3)


def _bits(size: int) -> int:
    """Bits of an index in a unit of so many values."""
    return 8 if size <= 256 else 12
