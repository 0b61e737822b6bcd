"""The grid of units that a leaf is coded in: a function of its shape and of the codec's unit alone.

Every leaf is a stack of L matrices N x M (`matrix_shape`), each cut into `down` x `across` units of
equal size (`grid_of`). Scalars are 1 x 1, vectors 1 x M. A tensor of more axes is split where N + M
is smallest, so that `[heads, width, model]` becomes `[heads * width, model]`. Leaves that stack
layers keep the layer axis as L.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Shape = tuple[int, int, int]
SHORT_ROW = 16  # values; rows of fewer share units
FEW = 1024  # units a slice; with more, filling up costs at most 0.1 %


class Unit(NamedTuple):
    """Largest unit that a codec codes together.

    Attributes:
      height, width: its sides.
      rows: `apart`: each row counts as a matrix (`units.Matrix`), also one of fewer than 16 values.
        `joined`: each matrix is read as one row, and cut into units of just this width. None =
        short rows are joined. `alone`: so, too, and each unit is coded by itself, without the
        matrix.
      each: how many units of its own a slice of one row has (`grid_of`), where `PerTensor` says so.
        None = the fewest.
    """

    height: int
    width: int
    rows: Literal["apart", "joined", "alone"] | None = None
    each: int | None = None


WHOLE_ROW = Unit(1, 2**62, "apart")
VALUE = Unit(1, 1, "alone")


class Grid(NamedTuple):
    """The matrices of a leaf `[L, N, M]`, cut into `down` x `across` units of `height` x `width`.

    Attributes:
      flat: whether each matrix is read as one row of N M values (`rows` is then 1).
    """

    layers: int
    rows: int
    columns: int
    height: int
    width: int
    flat: bool

    @property
    def down(self) -> int:
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    @property
    def padded(self) -> bool:
        """Whether some units hold fewer values of the leaf than others."""
        return (self.down * self.height, self.across * self.width) != (self.rows, self.columns)

    def to_units(self, x_LxNxM: jax.Array) -> jax.Array:
        """`[l, n, m]`, any whole units of the grid, as `[l, down, across, height, width]`.

        A side that does not divide is padded by repeating the last value: that keeps a unit's
        range.
        """
        h, w = self.height, self.width
        layers, n, m = x_LxNxM.shape
        width = ((0, 0), (0, -n % h), (0, -m % w))
        x = jnp.pad(x_LxNxM, width, mode="edge") if n % h or m % w else x_LxNxM
        x = x.reshape(layers, x.shape[1] // h, h, x.shape[2] // w, w)
        return x.swapaxes(2, 3)

    def from_units(self, x: jax.Array, rows: int, columns: int) -> jax.Array:
        """Inverse of `to_units`, of `rows` x `columns` values: `[l, rows, columns]`."""
        layers, down, across, h, w = x.shape
        x = x.swapaxes(2, 3).reshape(layers, down * h, across * w)
        return x[:, :rows, :columns]

    def real(self) -> tuple[jax.Array, jax.Array]:
        """bool `[down, height]` and `[across, width]`, False for rows and columns of padding."""
        sides = (self.down, self.height, self.rows), (self.across, self.width, self.columns)
        down, across = (jnp.arange(n * size).reshape(n, size) < end for n, size, end in sides)
        return down, across


def grid_of(shape: tuple[int, ...], stacked: bool, unit: Unit, slices: int = 1) -> Grid:
    """The grid of a leaf.

    Units lie inside rows, so that devices that hold rows hold whole units. Of rows of fewer than 16
    values, which would make units of less than a quarter of the unit, each matrix is read as one
    row. A payload that is cut into `slices` deals out units along a side. Where neither side
    divides, or `unit.each` is given, a matrix of fewer rows than slices is read as one row, too,
    and of a single row of few units each slice gets units of its own: the fewest equal ones, or
    `unit.each` (`PerTensor`). How many layers there are counts for nothing, so that a stack and a
    part of it have equal units.

    >>> grid_of((8, 768), False, Unit(1, 256))[1:]
    (8, 768, 1, 256, False)
    >>> grid_of((100, 3), False, Unit(1, 64))[1:]
    (1, 300, 1, 60, True)
    >>> grid_of((257, 134), False, Unit(64, 64))[1:]
    (257, 134, 52, 45, False)
    >>> grid_of((2, 100), False, Unit(1, 256), slices=4)[1:]
    (1, 200, 1, 50, True)
    """
    layers, n, m = matrix_shape(shape, stacked)
    if unit.rows == "joined":
        return Grid(layers, 1, n * m, 1, max(min(unit.width, n * m), 1), True)
    joins = unit.height == 1 and unit.rows in (None, "alone")
    short = m < SHORT_ROW and 4 * largest_divisor(m, unit.width) < unit.width
    if flat := joins and n > 1 and short:
        n, m = 1, n * m
    height, width = side(n, unit.height), side(m, unit.width)
    if joins and 1 < n < slices and (unit.each or -(-m // width) % slices):
        n, m, flat = 1, n * m, True
        width = side(m, unit.width)
    across = -(-m // width)
    if n == 1 and (unit.each or across % slices) and across < FEW * slices:
        of_slice = -(-m // slices)
        width = -(-of_slice // (unit.each or -(-of_slice // unit.width)))
    return Grid(layers, n, m, height, width, flat)


def side(n: int, limit: int) -> int:
    """Side of a unit: n if it fits; else its largest divisor from limit / 4 on; else equal pieces.

    Of equal pieces the last one is padded.

    >>> side(48, 64), side(768, 256), side(134, 64), side(257, 256)
    (48, 256, 45, 129)
    """
    if n <= limit:
        return max(n, 1)
    divisor = largest_divisor(n, limit)
    return divisor if 4 * divisor >= limit else -(-n // -(-n // limit))


def largest_divisor(n: int, limit: int) -> int:
    """Largest divisor of n that is at most `limit`.

    >>> largest_divisor(768, 64), largest_divisor(50, 64), largest_divisor(134, 64)
    (64, 50, 2)
    """
    return next((d for d in range(min(n, limit), 0, -1) if n % d == 0), 1)


def matrix_shape(shape: tuple[int, ...], stacked: bool) -> Shape:
    """(L, N, M) of a leaf; `stacked` leaves carry L as their first axis.

    >>> matrix_shape((), False), matrix_shape((7,), False), matrix_shape((4, 6, 9), False)
    ((1, 1, 1), (1, 1, 7), (1, 24, 9))
    >>> matrix_shape((12, 5, 7), True), matrix_shape((12,), True)
    ((12, 5, 7), (12, 1, 1))
    """
    at, lead = first_column(shape, stacked), int(stacked)
    return math.prod(shape[:lead]), math.prod(shape[lead:at]), math.prod(shape[at:])


def first_column(shape: tuple[int, ...], stacked: bool) -> int:
    """Axis of a leaf with which the columns of its matrices begin.

    >>> first_column((4, 6, 9), False), first_column((12, 5, 7), True), first_column((7,), False)
    (2, 2, 0)
    """
    lead = int(stacked)
    if len(shape) - lead < 2:
        return lead
    cuts = range(lead + 1, len(shape))
    return min(cuts, key=lambda i: math.prod(shape[lead:i]) + math.prod(shape[i:]))
