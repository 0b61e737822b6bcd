"""Encode the values that one codec has kept by another codec, as a leaf of their own.

`encode` and `decode` are those of the inner codec. Inside a region the values are laid out as
`Windows.drop_filling` returns them; these functions give the inner codec that layout.
"""

from __future__ import annotations

from typing import Any

import jax

from lowcomm_jax.compression.matrix import MatrixCodec, Shape
from lowcomm_jax.compression.row_sharding import InWindows, RowCut, leaf_windows, rows_cut

PyTree = Any


def encode(codec: MatrixCodec, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
    """As `codec.encode`; for a leaf in windows, x is a result of `Windows.drop_filling`."""
    if leaf_windows() is None:
        return codec.encode(x_LxNxM, state)
    cut = _cut(codec, x_LxNxM.shape)
    x = x_LxNxM
    with rows_cut(cut):
        if cut.windows is not None:
            x = InWindows(cut.windows.flatten(x_LxNxM), x_LxNxM.shape)
        return codec.encode(x, state)


def decode(codec: MatrixCodec, payload: PyTree, shape: Shape) -> jax.Array | InWindows:
    """As `codec.decode`; for a leaf in windows, an argument of `Windows.restore_filling`."""
    if leaf_windows() is None:
        return codec.decode(payload, shape)
    cut = _cut(codec, shape)
    with rows_cut(cut):
        x = codec.decode(payload, shape)
    return x if cut.windows is None else cut.windows.unflatten(x.flat)


def _cut(codec: MatrixCodec, shape: Shape) -> RowCut:
    """How the values are cut, with their windows; `RowCut()` where every device gets all."""
    own = leaf_windows().without_filling(shape)
    if own is None or codec.rows_together(shape) == 0 or not codec.splits_over(shape, own.devices):
        return RowCut()
    return RowCut(own.layers, own.axes, (), own)
