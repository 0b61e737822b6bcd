"""A function of rows, band by band, so that what lies between its steps stays in a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from lowcomm_jax.inside import axes_inside

PyTree = Any
BAND = 2**18  # values in a band, at least


def in_bands(fn: Callable[[PyTree], PyTree], each: int, values: int, tree: PyTree) -> PyTree:
    """`fn(tree)`; on a CPU one band of rows at a time, which spares it copies of whole matrices.

    Args:
      fn: maps leaves `[L, n, ...]` to such leaves and treats rows alike.
      each: of the n of the tree's leaves, how many make up one row.
      values: in one row, before or after coding.
    """
    layers, n = jax.tree.leaves(tree)[0].shape[:2]
    bands = _bands(n // each, values)

    def one(band):
        return jax.tree.map(lambda y: y[0], fn(jax.tree.map(lambda x: x[None], band)))

    def banded(tree):
        # Without an axis of length 1, for which a CPU compiler would copy everything.
        cut = jax.tree.map(lambda x: x.reshape(layers * bands, -1, *x.shape[2:]), tree)
        done = jax.lax.map(one, cut)
        return jax.tree.map(lambda y: y.reshape(layers, -1, *y.shape[2:]), done)

    if layers * bands == 1 or axes_inside():
        return fn(tree)
    return jax.lax.platform_dependent(tree, cpu=banded, default=fn)


def _bands(rows: int, values: int) -> int:
    """Most bands of equally many rows that hold `BAND` values each; 1 where there are none.

    >>> _bands(64, 2**18), _bands(64, 2**17), _bands(7, 2**17), _bands(4, 2**10)
    (64, 32, 1, 1)
    """
    fitting = (b for b in range(rows, 0, -1) if rows % b == 0 and rows // b * values >= BAND)
    return next(fitting, 1)
