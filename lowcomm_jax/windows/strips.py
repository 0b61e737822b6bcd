"""Matrices of few rows dealt out in strips, whole columns of chunks: `[N, w]` each.

So are they where there are fewer rows of chunks than devices. Rows, dealt out evenly, are handed on
column by column (an all-to-all, in which every device makes room for as many strips as the fullest
has). Where even the rows are fewer than the devices, columns are dealt out evenly, and neighbours
hand one another what lies across. No strip has as many chunks as there are devices; where there are
fewer strips than devices, some of these repeat what others do.
"""

from __future__ import annotations

import math

import jax

from lowcomm_jax.windows.deal import Deal
from lowcomm_jax.windows.windows import Shape, Windows


def works(shape: Shape, width: int, devices: int) -> bool:
    """Whether there is a row for every device, or else a strip."""
    return _by_rows(shape, devices).works() or (
        shape[2] % devices == 0 and Deal(math.prod(shape[1:]), shape[1] * width, devices).works()
    )


def cut(windows: Windows, x_LxT: jax.Array, shape: Shape, width: int) -> jax.Array:
    """`[L, N, M]` in windows (`Windows.flat`) -> strips `[L, D each, N, w]`, cut over strips."""
    rows, strips = _by_rows(shape, windows.devices), windows.deal(shape[1] * width)
    if not rows.works():
        turned = windows.cut_along(shape, 2).lie(x_LxT).swapaxes(1, 2)
        units = windows.units(turned.reshape(x_LxT.shape), strips.unit)
        return units.reshape(*units.shape[:2], width, shape[1]).swapaxes(2, 3)

    def local(x):
        x = x.reshape(*x.shape[:2], -1, width)[:, :, strips.slots.reshape(-1)]
        x = jax.lax.all_to_all(x, windows.axes, 2, 1, tiled=True)
        return x[:, rows.filled].swapaxes(1, 2)

    return windows.on_each(local)(windows.units(x_LxT, rows.unit))


def join(windows: Windows, x_LxSxNxW: jax.Array, shape: Shape) -> jax.Array:
    """Inverse of `cut`."""
    width = x_LxSxNxW.shape[3]
    rows, strips = _by_rows(shape, windows.devices), windows.deal(shape[1] * width)
    if not rows.works():
        units = x_LxSxNxW.swapaxes(2, 3).reshape(*x_LxSxNxW.shape[:2], -1)
        turned = windows.join(units).reshape(shape[0], shape[2], shape[1])
        return windows.cut_along(shape, 2).flat(turned.swapaxes(1, 2))

    def local(x):
        x = x.swapaxes(1, 2)[:, rows.slots.reshape(-1)]
        x = jax.lax.all_to_all(x, windows.axes, 1, 2, tiled=True)
        return x[:, :, strips.filled].reshape(*x.shape[:2], -1)

    return windows.join(windows.on_each(local)(x_LxSxNxW))


def _by_rows(shape: Shape, devices: int) -> Deal:
    return Deal(math.prod(shape[1:]), shape[2], devices)
