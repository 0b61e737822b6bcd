"""Pieces of a flat leaf, cut somewhere inside, to equal windows of it and back (`windows`).

With n pieces a device, before the cut and behind it, device d holds piece d, D + d, 2 D + d, ... of
all n D; its window are pieces d n to d n + n - 1. One all-to-all of what every device holds; where
there are fewer pieces than devices, with room for one to each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Axes = tuple[str, ...]


def to_windows(x: jax.Array, count: int, axes: Axes, devices: int) -> jax.Array:
    """From a cut behind `count` pieces to windows of as many: piece a of device d, which is piece
    a D + d of all, goes to device (a D + d) // count.
    """
    if count == 1:
        return x
    first, most = _first_pieces(count, devices), -(-count // devices)
    d = jax.lax.axis_index(axes)
    pieces = x.reshape(x.shape[0], count, -1)
    sent = jnp.asarray(first)[:, d][:, None] + jnp.arange(most)[None]
    pieces = pieces[:, jnp.minimum(sent, count - 1).reshape(-1)]
    got = jax.lax.all_to_all(pieces, axes, 1, 1, tiled=True)
    number = d * count + jnp.arange(count)
    source = number % devices
    slot = source * most + number // devices - jnp.asarray(first)[d, source]
    return got[:, slot].reshape(x.shape)


def from_windows(x: jax.Array, count: int, axes: Axes, devices: int) -> jax.Array:
    """Inverse of `to_windows`."""
    if count == 1:
        return x
    first, most = _first_pieces(count, devices), -(-count // devices)
    d = jax.lax.axis_index(axes)
    pieces = x.reshape(x.shape[0], count, -1)
    wanted = jnp.asarray(first)[d][:, None] + jnp.arange(most)[None]
    own = wanted * devices + jnp.arange(devices)[:, None] - d * count
    pieces = pieces[:, jnp.clip(own, 0, count - 1).reshape(-1)]
    got = jax.lax.all_to_all(pieces, axes, 1, 1, tiled=True)
    number = jnp.arange(count) * devices + d
    source = number // count
    slot = source * most + jnp.arange(count) - jnp.asarray(first)[source, d]
    return got[:, slot].reshape(x.shape)


def _first_pieces(count: int, devices: int) -> np.ndarray:
    """First piece of device d that lies in window e, int32 `[e, d]`."""
    e, d = np.arange(devices)[:, None], np.arange(devices)[None]
    return (-((d - e * count) // devices)).astype(np.int32)
