"""Gives a codec the sharding of its leaf inside a region, and runs functions on each device's rows.

The exchange sets with `rows_cut` how a leaf is cut while its codec is traced. The codec reads that
through the functions of this module.

Within `Regions.lift` the axes inside a region are Auto: the compiler places the communication. That
is right for sums and products. For gathers, scatters and sorts the compiler gathers the operands,
and with two sharded axes inside a manual one it aborts the process. So they run on every device's
own rows instead (`on_rows`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

PyTree = Any


class RowCut(NamedTuple):
    """Mesh axes that cut the layers, rows and columns of a stack of matrices `[L, N, M]`.

    `windows` (`windows.Windows`) belongs to a leaf that is cut otherwise. `rows` then cut its
    units, or `rows` and `columns` cut the matrix that `Windows.to_matrix` makes of it.

    """

    layers: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    windows: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InWindows:
    """A stack of matrices in windows of equal size (`windows.Windows.flatten`).

    Attributes:
      flat: `[L, N M]`, cut over the second axis.
      shape: (L, N, M).
    """

    flat: jax.Array
    shape: tuple[int, int, int] = dataclasses.field(metadata={"static": True})


_CUT: contextvars.ContextVar[RowCut | None] = contextvars.ContextVar("cut", default=None)


@contextlib.contextmanager
def rows_cut(cut: RowCut) -> Iterator[None]:
    """Set how the exchange has laid out the leaf whose codec is traced in this context."""
    token = _CUT.set(cut)
    try:
        yield
    finally:
        _CUT.reset(token)


def leaf_windows() -> Any:
    """The `windows.Windows` of the leaf whose codec is traced; None where it lies in rows."""
    return (_CUT.get() or RowCut()).windows


def axes_inside() -> dict[str, int]:
    """Sizes of the Auto mesh axes of more than one device around the function being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types or ())
    return {name: size for name, size, kind in kinds if size > 1 and kind == AxisType.Auto}


def pin_whole(x: jax.Array) -> jax.Array:
    """Let every device of the region hold all of x."""
    if not axes_inside():
        return x
    return jax.lax.with_sharding_constraint(x, P(*(None,) * x.ndim))


def pin_rows(x: jax.Array, axis: int = 1) -> jax.Array:
    """Let every device of the region hold its rows of x `[L, ..., N, ...]`, N being `axis`."""
    return _pin(x, axis, (_CUT.get() or RowCut()).rows)


def pin_columns(x: jax.Array, axis: int = 2) -> jax.Array:
    """Let every device of the region hold its columns of x `[L, ..., M, ...]`, M being `axis`."""
    return _pin(x, axis, (_CUT.get() or RowCut()).columns)


def _pin(x: jax.Array, axis: int, axes: tuple[str, ...]) -> jax.Array:
    if not axes_inside():
        return x
    layers = (_CUT.get() or RowCut()).layers
    spec = P(layers or None, *(None,) * (axis - 1), axes or None)
    return jax.lax.with_sharding_constraint(x, spec)


def axes_of_matrix() -> tuple[str, ...]:
    """Mesh axes of more than one device over which rows and columns of the matrices are cut."""
    cut, axes = _CUT.get() or RowCut(), axes_inside()
    return tuple(a for a in (*cut.rows, *cut.columns) if a in axes)


def pin_split(x: jax.Array, axis: int) -> jax.Array:
    """Let every device hold an equal part of x `[L, ...]` along `axis`; all where none divides."""
    if not axes_inside():
        return x
    spec = split_spec(x.shape[axis], axis)
    return pin_whole(x) if spec is None else jax.lax.with_sharding_constraint(x, spec)


def split_spec(size: int, axis: int) -> P | None:
    """Layout of `pin_split`; None where `size` does not divide over the devices of a matrix."""
    axes, sizes = axes_of_matrix(), axes_inside()
    if not axes or size % math.prod(sizes[a] for a in axes):
        return None
    layers = (_CUT.get() or RowCut()).layers
    return P(layers or None, *(None,) * (axis - 1), axes)


def on_rows(fn: Callable, groups: int, cut: PyTree, whole: PyTree = ()) -> PyTree:
    """`fn(cut, whole)` on the part of every device, without communication.

    Args:
      fn: maps leaves `[L, rows, ...]` to such leaves, and treats groups of rows alike.
      groups: of neighbouring rows that `fn` keeps together. Where they do not divide over the
        devices, every device works on all of them.
      cut: leaves `[L, rows, ...]`; a row is a row of the matrix, a block or a chunk.
      whole: the same on all devices.
    """
    axes = axes_inside()
    if not axes:
        return fn(cut, whole)
    at = _CUT.get() or RowCut()
    divides = groups % math.prod(axes[a] for a in at.rows if a in axes) == 0
    spec = P(at.layers or None, at.rows or None) if divides else P()
    run = jax.shard_map(
        fn, in_specs=(spec, P()), out_specs=spec, axis_names=set(axes), check_vma=False
    )
    return run(cut, whole)
