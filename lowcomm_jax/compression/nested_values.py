"""Values that one codec has chosen, coded by another: a leaf of their own."""

from __future__ import annotations

from typing import Any

import jax

from lowcomm_jax.compression.matrix import MatrixCodec, Shape
from lowcomm_jax.compression.row_sharding import RowCut, Spread, rows_cut, windows

PyTree = Any


def encode(codec: MatrixCodec, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
    """As `codec.encode`; of a leaf in windows, x is what `Windows.drop` has left."""
    if windows() is None:
        return codec.encode(x_LxNxM, state)
    cut = _cut(codec, x_LxNxM.shape)
    with rows_cut(cut):
        x = x_LxNxM if cut.windows is None else Spread(cut.windows.flat(x_LxNxM), x_LxNxM.shape)
        return codec.encode(x, state)


def decode(codec: MatrixCodec, payload: PyTree, shape: Shape) -> jax.Array:
    """As `codec.decode`, for `Windows.fill`."""
    if windows() is None:
        return codec.decode(payload, shape)
    cut = _cut(codec, shape)
    with rows_cut(cut):
        x = codec.decode(payload, shape)
    return x if cut.windows is None else cut.windows.lie(x.flat)


def _cut(codec: MatrixCodec, shape: Shape) -> RowCut:
    """How the values lie, and their windows; `Cut()` where every device has, or gets, all."""
    left = windows().left(shape)
    if left is None or codec.rows_together(shape) == 0 or not codec.deals(shape, left.devices):
        return RowCut()
    return RowCut(left.layers, left.axes, (), left)
