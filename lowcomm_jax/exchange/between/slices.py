"""What an exchange needs to know of payloads that are reduced slice by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from lowcomm_jax.exchange.between.wire import Shapes

Arrays = dict[str, np.ndarray]


class Reduction(Protocol):
    """How payloads are cut and averaged; called on the threads of an exchange.

    Attributes:
      parts: how many slices, one for each region of the run.
      like: dtypes and shapes of one slice, cut or reduced; rest: of what all need beside them.
    """

    parts: int
    like: Shapes
    rest: Shapes

    def split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """One region's arrays as (what all need of it, slices `[parts, ...]`)."""

    def reduce(self, slice_R: Arrays, rest_R: Arrays, takes_part_R: np.ndarray) -> Arrays:
        """What everyone's slices of one number come to, their average or sum, `like`.

        Args:
          slice_R: `[R, ...]`; rest_R: what `split` gave first, `[R, ...]`; zeros for regions that
            take no part.
          takes_part_R: bool `[R]`.
        """


def owners(present: Sequence[int], parts: int) -> list[int]:
    """Which region reduces each slice: the one of its number, or another that is there."""
    return [s if s in present else present[s % len(present)] for s in range(parts)]


def one_slice(slices: Arrays, number: int) -> Arrays:
    """A single one, without the leading axis."""
    return {name: x[number] for name, x in slices.items()}


def name_of_slice(name: str, number: int) -> str:
    """Under which a slice of a payload is packed."""
    return f"{name}/slice {number}"


def side_by_side(by_region: Mapping[int, Arrays], count: int, like: Shapes) -> Arrays:
    """Rows `[R, ...]` of arrays like these; zeros for regions that are not there."""
    # Through jnp, which knows the narrow types that NumPy has no names for.
    rows = {n: np.zeros((count, *shape), jnp.dtype(d)) for n, (d, shape) in like.items()}
    for region, arrays in by_region.items():
        for name, x in arrays.items():
            rows[name][region] = x
    return rows
