"""Leaves as matrices that are cut along their columns, so that every device has all rows."""

from __future__ import annotations

import math

import jax

from lowcomm_jax.windows.windows import Shape, Windows


def cut(windows: Windows, x: jax.Array, shape: Shape) -> jax.Array:
    """A leaf as `[L, N, M]`, M a multiple of D; nothing moves where it is cut so."""
    if _is_cut(windows, shape):
        return x.reshape(shape)
    return windows.cut_along(shape, 2).lie(windows.flat(x))


def join(windows: Windows, x_LxNxM: jax.Array) -> jax.Array:
    """Inverse of `cut`."""
    if _is_cut(windows, x_LxNxM.shape):
        return x_LxNxM.reshape(windows.shape)
    return windows.lie(windows.cut_along(x_LxNxM.shape, 2).flat(x_LxNxM))


def _is_cut(windows: Windows, shape: Shape) -> bool:
    (axis, *_), *others = windows.cuts
    return not others and math.prod(windows.shape[axis:]) == shape[2]
