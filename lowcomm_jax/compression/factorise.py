"""Factorisations of matrices, one after the other: under `vmap` too.

On CPU jaxlib 0.10 deals a batch of matrices out to the threads that run the program, and the one
that deals them out waits. When all threads do so at once, as the devices of one processor may, none
is left to do the work, and the program never ends. (Later, jaxlib takes the matrices in turn.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap


@sequential_vmap
def orthonormal(x_NxR: jax.Array) -> jax.Array:
    """Q of X = Q R, `[N, min(N, R)]`."""
    return jnp.linalg.qr(x_NxR)[0]


@sequential_vmap
def triangular(x_NxR: jax.Array) -> jax.Array:
    """R of X = Q R, `[min(N, R), R]`."""
    return jnp.linalg.qr(x_NxR)[1]


@sequential_vmap
def singular_values(x_NxM: jax.Array) -> jax.Array:
    """In descending order, `[min(N, M)]`."""
    return jnp.linalg.svd(x_NxM, compute_uv=False)
