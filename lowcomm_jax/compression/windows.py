"""Split a sharded leaf over the devices of a region so that every device holds whole units.

In: one leaf, flat as `[L, T]`, as it is sharded inside a region. Out: its units `[L, D n, w]`, room
for n whole units on each of D devices; or matrices cut along columns; or strips of chunks. Every
function has an inverse. `UnitSplit.works` says beforehand whether a split is possible.

A unit is a group of values that a codec encodes together: a block, a row of chunks, a group, a row.
The leaf moves in two steps:

1. `Windows.flatten` cuts the leaf into D equal windows of T / D values, one a device. That is one
   all-to-all of each device's own shard; nothing moves where the first axis is the sharded one.
2. `Windows.to_units` moves the borders between windows to where units begin. Neighbours exchange
   the values in between, at most two units.

Where the units do not divide over the devices, `UnitSplit` gives some devices one more than others,
and every device fills its room up to the same number. No device ever holds the whole
leaf. The filling does not travel between regions (`Windows.drop_filling`).

Everything here is traced inside a region (`Regions.lift`), where the region's axes are Auto.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.row_sharding import axes_inside

Axes = tuple[str, ...]
Shape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Move one leaf between its own layout, equal windows, and units (see the module).

    Attributes:
      shape: of the leaf, `[L, ...]` with `lead`.
      lead: whether the first axis is that of the layers.
      layers: mesh axes that cut the layers.
      cuts: (axis of the leaf, mesh axes, number of devices), front to back.
    """

    shape: tuple[int, ...]
    lead: bool
    layers: Axes
    cuts: tuple[tuple[int, Axes, int], ...]

    @property
    def axes(self) -> Axes:
        """Mesh axes that cut a layer, in the order of the windows."""
        return tuple(axis for _, axes, _ in self.cuts for axis in axes)

    @property
    def devices(self) -> int:
        return math.prod(n for _, _, n in self.cuts)

    @property
    def size(self) -> int:
        """T."""
        return math.prod(self.shape[int(self.lead) :])

    @property
    def spec(self) -> P:
        """The leaf's own layout."""
        entries: list = [None] * len(self.shape)
        if self.lead:
            entries[0] = self.layers or None
        for dim, axes, _ in self.cuts:
            entries[dim] = axes
        return P(*entries)

    def split(self, unit: int) -> UnitSplit:
        """How units of this many values are split over the devices."""
        return UnitSplit(self.size, unit, self.devices)

    def flatten(self, x: jax.Array) -> jax.Array:
        """The leaf in windows: `[L, T]`, cut over T."""
        return self._over(self._flatten, self.spec, self._along(1))(x)

    def unflatten(self, x_LxT: jax.Array) -> jax.Array:
        """Inverse of `flatten`."""
        return self._over(self._unflatten, self._along(1), self.spec)(x_LxT)

    def to_matrix(self, x: jax.Array, shape: Shape) -> jax.Array:
        """The leaf as `[L, N, M]`, cut along rows if they divide over the devices, else columns."""
        return self._stack(shape).unflatten(self.flatten(x))

    def from_matrix(self, x_LxNxM: jax.Array) -> jax.Array:
        """Inverse of `to_matrix`."""
        return self.unflatten(self._stack(x_LxNxM.shape).flatten(x_LxNxM))

    def matrix_axis(self, shape: Shape) -> int | None:
        """The axis of `[L, N, M]` that `to_matrix` cuts; None where neither divides."""
        return next((i for i in (1, 2) if shape[i] % self.devices == 0), None)

    def _stack(self, shape: Shape) -> Windows:
        return self.cut_along(shape, self.matrix_axis(shape))

    def cut_along(self, shape: tuple[int, ...], axis: int) -> Windows:
        """The windows of another leaf `[L, ...]`, which the same devices cut along one axis."""
        return Windows(tuple(shape), True, self.layers, ((axis, self.axes, self.devices),))

    def to_units(self, x_LxT: jax.Array, unit: int) -> jax.Array:
        """`[L, D n, w]`, cut over units; the last value of the leaf fills its last unit up."""
        along, split = self._along(1), self.split(unit)
        return self._over(lambda x: self._to_units(x, split), along, along)(x_LxT)

    def from_units(self, x_LxUxW: jax.Array) -> jax.Array:
        """Inverse of `to_units`."""
        along, split = self._along(1), self.split(x_LxUxW.shape[2])
        return self._over(lambda x: self._from_units(x, split), along, along)(x_LxUxW)

    def regroup(self, x_LxUxW: jax.Array, shares: UnitSplit) -> jax.Array:
        """Units in the order of a finer split: each device spreads its own over its shares.

        Args:
          shares: of the same units, over S shares, a multiple of the devices.

        Returns:
          `[L, S m, w]`, room for m units in each share.
        """
        first_D = self.split(x_LxUxW.shape[2]).starts[:-1]
        own = shares.slots.reshape(self.devices, -1) - first_D[:, None]
        return self.on_each(lambda x: x[:, jnp.asarray(own)[self._number()]])(x_LxUxW)

    def ungroup(self, x_LxSxW: jax.Array, shares: UnitSplit) -> jax.Array:
        """Inverse of `regroup`."""
        room = shares.slots.size // self.devices
        at = (
            shares.filled[self.split(x_LxSxW.shape[2]).slots]
            - room * np.arange(self.devices)[:, None]
        )
        return self.on_each(lambda x: x[:, jnp.asarray(at)[self._number()]])(x_LxSxW)

    def real(self, unit: int) -> jax.Array:
        """Bool `[D n, w]`: which values of `to_units` are the leaf's own, and not filling."""
        split = self.split(unit)

        def local():
            whole, rest = (jnp.asarray(x.astype(np.int32))[self._number()] for x in split.own)
            return leading(split.each, unit, whole, rest)

        return self._over(local, (), P(self.axes))()

    def drop_filling(self, x: jax.Array, unit: int, turned: bool = False) -> jax.Array:
        """Remove the filling of the devices' rooms, so that only the U units are left.

        Nothing moves where units divide over the devices. Else the last axis is cut instead of the
        axis of units, by one all-to-all; where it does not divide, every device gets the whole.

        Args:
          x: `[L, D n k, ...]`, k entries for entries place.
          turned: order the result by entry, not by unit.

        Returns:
          `[L, U k, ...]`, or `[L, k U, ...]` if `turned`.
        """
        split = self.split(unit)
        rows, entries = split.devices * split.each, x.shape[1] // (split.devices * split.each)
        if split.count % split.devices == 0 and not (turned and entries > 1):
            return x
        swap = self._swaps(x.shape)

        def local(x):
            if swap:
                x = jax.lax.all_to_all(x, self.axes, x.ndim - 1, 1, tiled=True)
            else:
                x = jax.lax.all_gather(x, self.axes, axis=1, tiled=True)
            kept = x.reshape(x.shape[0], rows, entries, *x.shape[2:])[:, split.filled]
            kept = kept.swapaxes(1, 2) if turned else kept
            return kept.reshape(x.shape[0], -1, *x.shape[2:])

        return self._over(local, self._along(1), self._along(x.ndim - 1 if swap else None))(x)

    def restore_filling(self, x: jax.Array, unit: int, turned: bool = False) -> jax.Array:
        """Inverse of `drop_filling`; places without a unit repeat another one."""
        split = self.split(unit)
        entries, slots = x.shape[1] // split.count, split.slots
        if split.count % split.devices == 0 and not (turned and entries > 1):
            return x
        swap = self._swaps(x.shape)

        def local(x):
            own = slots.reshape(-1) if swap else jnp.asarray(slots)[self._number()]
            order = (entries, split.count) if turned else (split.count, entries)
            x = x.reshape(x.shape[0], *order, *x.shape[2:])
            x = (x.swapaxes(1, 2) if turned else x)[:, own]
            x = x.reshape(x.shape[0], -1, *x.shape[3:])
            return jax.lax.all_to_all(x, self.axes, 1, x.ndim - 1, tiled=True) if swap else x

        return self._over(local, self._along(x.ndim - 1 if swap else None), self._along(1))(x)

    def on_each(self, fn: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """`fn` on every device's part of `[L, ...]`, cut over the second axis before and after."""
        return self._over(fn, self._along(1), self._along(1))

    def without_filling(self, shape: Shape) -> Windows | None:
        """The windows of a result of `drop_filling` of this shape; None = whole on every device."""
        axis = 1 if shape[1] % self.devices == 0 else 2 if self._swaps(shape) else None
        return None if axis is None else self.cut_along(shape, axis)

    def _swaps(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 2 and shape[-1] % self.devices == 0

    def _along(self, axis: int | None) -> P:
        """Layout of `[L, ...]` that is cut along one axis."""
        layers = self.layers or None
        return P(layers) if axis is None else P(layers, *(None,) * (axis - 1), self.axes)

    def _over(self, fn: Callable, before: P | tuple[()], after: P) -> Callable:
        return jax.shard_map(
            fn,
            in_specs=before,
            out_specs=after,
            axis_names=set(axes_inside()),
            check_vma=False,
        )

    def _number(self) -> jax.Array:
        """The number of this device's window."""
        return jax.lax.axis_index(self.axes)

    def _cut_counts(self) -> list[tuple[int, Axes, int]]:
        """For every cut: how many pieces of the leaf a device holds, its axes and its devices."""
        lead, counts, done = int(self.lead), [], 1
        for dim, axes, n in self.cuts:
            counts.append((math.prod(self.shape[lead:dim]) // done, axes, n))
            done *= n
        return counts

    def _flatten(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0] if self.lead else 1, -1)
        for count, axes, n in self._cut_counts():
            x = pieces_to_windows(x, count, axes, n)
        return x

    def _unflatten(self, x: jax.Array) -> jax.Array:
        for count, axes, n in reversed(self._cut_counts()):
            x = windows_to_pieces(x, count, axes, n)
        shape = list(self.shape)
        for dim, _, n in self.cuts:
            shape[dim] //= n
        if self.lead:
            shape[0] = x.shape[0]
        return x.reshape(shape)

    def _to_units(self, x: jax.Array, split: UnitSplit) -> jax.Array:
        before, behind = split.before, split.behind
        wide = [self._from_neighbour(x[:, x.shape[1] - before :], 1), x]
        wide.append(self._from_neighbour(x[:, :behind], -1))
        x = jnp.concatenate(wide, axis=1)
        # Behind the last device's window there is nothing: its last value, again and again.
        end = before + split.size // split.devices
        room = split.each * split.unit + before + int(split.shifts[:-1].max()) - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, max(room, 0))))
        at = jnp.arange(x.shape[1])[None]
        beyond = (self._number() == split.devices - 1) & (at >= end)
        x = jnp.where(beyond, x[:, end - 1 : end], x)
        start = before + jnp.asarray(split.shifts)[self._number()]
        x = jax.lax.dynamic_slice_in_dim(x, start, split.each * split.unit, axis=1)
        return x.reshape(x.shape[0], split.each, split.unit)

    def _from_units(self, x: jax.Array, split: UnitSplit) -> jax.Array:
        x, d = x.reshape(x.shape[0], -1), self._number()
        early, late = split.early, split.late
        end = jnp.asarray(split.held)[d] * split.unit
        last = jax.lax.dynamic_slice_in_dim(x, end - early, early, axis=1)
        first = self._from_neighbour(x[:, :late], -1)
        x = jnp.concatenate([self._from_neighbour(last, 1), x, jnp.zeros_like(first)], axis=1)
        x = jax.lax.dynamic_update_slice_in_dim(x, first, early + end, axis=1)
        start = early - jnp.asarray(split.shifts)[d]
        return jax.lax.dynamic_slice_in_dim(x, start, split.size // split.devices, axis=1)

    def _from_neighbour(self, x: jax.Array, step: int) -> jax.Array:
        """Values from the device `step` windows before; zeros where there is none."""
        if x.shape[1] == 0:
            return x
        at = self._in_mesh()
        pairs = [(at[d], at[d + step]) for d in range(len(at)) if 0 <= d + step < len(at)]
        return jax.lax.ppermute(x, self._ordered(), pairs)

    def _ordered(self) -> tuple[str, ...]:
        """The axes in the order of the mesh: `ppermute` counts devices so, and takes no other."""
        return tuple(axis for axis in jax.sharding.get_abstract_mesh().shape if axis in self.axes)

    def _in_mesh(self) -> list[int]:
        """The device of every window, numbered with axes in the order of the mesh."""
        sizes, ordered = jax.sharding.get_abstract_mesh().shape, self._ordered()
        numbers = np.arange(self.devices).reshape([sizes[axis] for axis in ordered])
        return numbers.transpose([ordered.index(axis) for axis in self.axes]).reshape(-1).tolist()


@dataclasses.dataclass(frozen=True)
class UnitSplit:
    """How U units of w values, T values in all, are split evenly over D devices.

    Known on the host. A device has room for n units, the same number
    on every device; its window holds T / D values, before units are formed.

    Attributes:
      size: T, a multiple of D.
      unit: w.
      devices: D.
    """

    size: int
    unit: int
    devices: int

    @property
    def count(self) -> int:
        """U; the last unit may be filled up."""
        return -(-self.size // self.unit)

    @property
    def each(self) -> int:
        """Units that every device has room for, n."""
        return -(-self.count // self.devices)

    @property
    def starts(self) -> np.ndarray:
        """First unit of each device, and U: int32 `[D + 1]`."""
        return np.array([d * self.count // self.devices for d in range(self.devices + 1)], np.int32)

    @property
    def held(self) -> np.ndarray:
        """Units of each device, int32 `[D]`."""
        return np.diff(self.starts)

    @property
    def own(self) -> tuple[np.ndarray, np.ndarray]:
        """(units of each device that are full, values of its last one that is not), `[D]`."""
        left = self.size - self.starts[:-1].astype(np.int64) * self.unit
        return np.divmod(np.minimum(self.held.astype(np.int64) * self.unit, left), self.unit)

    @property
    def slots(self) -> np.ndarray:
        """Which unit each place holds: the device's own, then its last one again; `[D, n]`."""
        slots = self.starts[:-1, None] + np.arange(self.each, dtype=np.int32)[None]
        return np.clip(slots, 0, np.maximum(self.starts[1:, None] - 1, 0))

    @property
    def filled(self) -> np.ndarray:
        """Places of all rooms, counted through, that hold the U units: `[U]`."""
        return np.flatnonzero(np.arange(self.each)[None] < self.held[:, None])

    @property
    def shifts(self) -> np.ndarray:
        """Values by which each device's units begin after its window, and U's end, `[D + 1]`."""
        windows = np.arange(self.devices + 1, dtype=np.int64) * (self.size // self.devices)
        return (self.starts.astype(np.int64) * self.unit - windows).astype(np.int32)

    @property
    def before(self) -> int:
        """Most values that any device's units take from the window before its own."""
        return max(0, -int(self.shifts[:-1].min()))

    @property
    def behind(self) -> int:
        """Most values that any device's units take from the window after its own."""
        ends = self.shifts[:-2] + self.each * self.unit - self.size // self.devices
        return max(0, int(ends.max(initial=0)))

    @property
    def early(self) -> int:
        """Most values of any window that belong to the units of the device before."""
        return max(0, int(self.shifts[:-1].max()))

    @property
    def late(self) -> int:
        """Most values of any window that belong to the units of the next device."""
        return max(0, -int(self.shifts[1:].min()))

    def works(self) -> bool:
        """Whether every device has a unit and finds all of its values in neighbouring windows.

        Two units a device are always enough.

        >>> UnitSplit(512, 64, 4).works(), UnitSplit(256, 100, 4).works()
        (True, False)
        """
        if self.size % self.devices or self.count < self.devices:
            return False
        least = int(self.held.min()) * self.unit
        window = self.size // self.devices
        return max(self.before, self.behind) <= window and max(self.early, self.late) <= least


def leading(count: int, width: int, whole, rest) -> jax.Array:
    """Bool `[count, width]`: the values of the first `whole` rows, and `rest` of the next one.

    Counted by rows: a number of values may exceed int32.
    """
    row = jnp.arange(count, dtype=jnp.int32)[:, None]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    return (row < whole) | ((row == whole) & (place < rest))


# Matrices cut along columns: every device has all rows.


def cut_columns(windows: Windows, x: jax.Array, shape: Shape) -> jax.Array:
    """A leaf as `[L, N, M]` cut along M, a multiple of D; nothing moves where it is cut so."""
    if _is_cut(windows, shape):
        return x.reshape(shape)
    return windows.cut_along(shape, 2).unflatten(windows.flatten(x))


def join_columns(windows: Windows, x_LxNxM: jax.Array) -> jax.Array:
    """Inverse of `cut_columns`."""
    if _is_cut(windows, x_LxNxM.shape):
        return x_LxNxM.reshape(windows.shape)
    return windows.unflatten(windows.cut_along(x_LxNxM.shape, 2).flatten(x_LxNxM))


def _is_cut(windows: Windows, shape: Shape) -> bool:
    (axis, *_), *others = windows.cuts
    return not others and math.prod(windows.shape[axis:]) == shape[2]


# Strips: whole columns of chunks, `[N, w]` each, for matrices with fewer rows of chunks than
# devices. A row for every device: rows are split evenly, then handed on column by column in one
# all-to-all, in which every device makes room for as many strips as the fullest device has. Fewer
# rows than devices: columns are split evenly, and neighbours hand one another what lies across. No
# strip has as many chunks as there are devices. Where strips are fewer than the devices, some
# devices repeat what others do.


def strips_work(shape: Shape, width: int, devices: int) -> bool:
    """Whether `cut_strips` can split this matrix: every device gets a row, or else a strip."""

    by_columns = UnitSplit(math.prod(shape[1:]), shape[1] * width, devices)
    return _by_rows(shape, devices).works() or (shape[2] % devices == 0 and by_columns.works())


def cut_strips(windows: Windows, x_LxT: jax.Array, shape: Shape, width: int) -> jax.Array:
    """`[L, N, M]` in windows (`Windows.flatten`) -> strips `[L, D n, N, w]`, cut over strips."""
    rows, strips = _by_rows(shape, windows.devices), windows.split(shape[1] * width)
    if not rows.works():
        turned = windows.cut_along(shape, 2).unflatten(x_LxT).swapaxes(1, 2)
        units = windows.to_units(turned.reshape(x_LxT.shape), strips.unit)
        return units.reshape(*units.shape[:2], width, shape[1]).swapaxes(2, 3)

    def local(x):
        x = x.reshape(*x.shape[:2], -1, width)[:, :, strips.slots.reshape(-1)]
        x = jax.lax.all_to_all(x, windows.axes, 2, 1, tiled=True)
        return x[:, rows.filled].swapaxes(1, 2)

    return windows.on_each(local)(windows.to_units(x_LxT, rows.unit))


def join_strips(windows: Windows, x_LxSxNxW: jax.Array, shape: Shape) -> jax.Array:
    """Inverse of `cut_strips`."""
    width = x_LxSxNxW.shape[3]
    rows, strips = _by_rows(shape, windows.devices), windows.split(shape[1] * width)
    if not rows.works():
        units = x_LxSxNxW.swapaxes(2, 3).reshape(*x_LxSxNxW.shape[:2], -1)
        turned = windows.from_units(units).reshape(shape[0], shape[2], shape[1])
        return windows.cut_along(shape, 2).flatten(turned.swapaxes(1, 2))

    def local(x):
        x = x.swapaxes(1, 2)[:, rows.slots.reshape(-1)]
        x = jax.lax.all_to_all(x, windows.axes, 1, 2, tiled=True)
        return x[:, :, strips.filled].reshape(*x.shape[:2], -1)

    return windows.from_units(windows.on_each(local)(x_LxSxNxW))


def _by_rows(shape: Shape, devices: int) -> UnitSplit:
    return UnitSplit(math.prod(shape[1:]), shape[2], devices)


# Pieces of a leaf whose sharded axis is not the first. With n = `count`, device d holds pieces d,
# D + d, 2 D + d, ... of all n D in the flat leaf; its window holds pieces d n to d n + n - 1. One
# all-to-all moves them. Where n is below D, every device makes room for one piece to each other.


def pieces_to_windows(x: jax.Array, count: int, axes: Axes, devices: int) -> jax.Array:
    """From `count` scattered pieces on each device to a window of as many neighbouring ones.

    Piece a of device d is piece a D + d of all. It goes to device (a D + d) // count.
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


def windows_to_pieces(x: jax.Array, count: int, axes: Axes, devices: int) -> jax.Array:
    """Inverse of `pieces_to_windows`."""
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
