"""How a sharded leaf is dealt out so that every device of a region holds whole units of it.

A unit is what a codec codes together: a block, a band of chunks, a group, a row. A leaf, seen flat
`[L, T]`, is first cut into equal windows of T / D values, one a device (`flat`: an all-to-all of
each device's own shard, nothing where the first axis is cut), and these are then moved to where
units begin (`units`: neighbours hand one another what lies across, at most two units). Units that
do not divide over the devices are dealt out as evenly as they go, and each device's part is filled
up to the same number: nobody ever holds the whole leaf, and nothing of the filling travels between
regions (`drop`).

Everything here is traced inside a region (`Regions.lift`), where its axes are Auto.
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

# -- columns -----------------------------------------------------------------------------------
#
# Leaves as matrices that are cut along their columns, so that every device has all rows.


def cut_columns(windows: Windows, x: jax.Array, shape: Shape) -> jax.Array:
    """A leaf as `[L, N, M]`, M a multiple of D; nothing moves where it is cut so."""
    if _is_cut(windows, shape):
        return x.reshape(shape)
    return windows.cut_along(shape, 2).lie(windows.flat(x))


def join_columns(windows: Windows, x_LxNxM: jax.Array) -> jax.Array:
    """Inverse of `cut`."""
    if _is_cut(windows, x_LxNxM.shape):
        return x_LxNxM.reshape(windows.shape)
    return windows.lie(windows.cut_along(x_LxNxM.shape, 2).flat(x_LxNxM))


def _is_cut(windows: Windows, shape: Shape) -> bool:
    (axis, *_), *others = windows.cuts
    return not others and math.prod(windows.shape[axis:]) == shape[2]


# -- deal --------------------------------------------------------------------------------------
#
# Units of a leaf over the devices of a region, as evenly as they go (`windows`).


@dataclasses.dataclass(frozen=True)
class Deal:
    """U units of w values, T values in all, over D devices.

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
        """Units that every device has room for."""
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
    def slots(self) -> np.ndarray:
        """Units for what each device has room for: its own, the last of them again; `[D, each]`."""
        slots = self.starts[:-1, None] + np.arange(self.each, dtype=np.int32)[None]
        return np.clip(slots, 0, np.maximum(self.starts[1:, None] - 1, 0))

    @property
    def filled(self) -> np.ndarray:
        """Which places of that room hold the U units, `[U]`."""
        return np.flatnonzero(np.arange(self.each)[None] < self.held[:, None])

    @property
    def shifts(self) -> np.ndarray:
        """Values by which each device's units begin after its window, and U's end, `[D + 1]`."""
        windows = np.arange(self.devices + 1, dtype=np.int64) * (self.size // self.devices)
        return (self.starts.astype(np.int64) * self.unit - windows).astype(np.int32)

    @property
    def before(self) -> int:
        """Most values that a device's units need of the window before its own."""
        return max(0, -int(self.shifts[:-1].min()))

    @property
    def behind(self) -> int:
        """Most values that a device's units need of the window behind its own."""
        ends = self.shifts[:-2] + self.each * self.unit - self.size // self.devices
        return max(0, int(ends.max(initial=0)))

    @property
    def early(self) -> int:
        """Most values of a window that lie in the units of the device before."""
        return max(0, int(self.shifts[:-1].max()))

    @property
    def late(self) -> int:
        """Most values of a window that lie in the units of the device behind."""
        return max(0, -int(self.shifts[1:].min()))

    def works(self) -> bool:
        """Whether neighbours alone have what a device needs, and every device has a unit.

        So it is from two units a device on.

        >>> Deal(512, 64, 4).works(), Deal(256, 100, 4).works()
        (True, False)
        """
        if self.size % self.devices or self.count < self.devices:
            return False
        least = int(self.held.min()) * self.unit
        window = self.size // self.devices
        return max(self.before, self.behind) <= window and max(self.early, self.late) <= least


# -- pieces ------------------------------------------------------------------------------------
#
# Pieces of a flat leaf, cut somewhere inside, to equal windows of it and back (`windows`).
#
# With n pieces a device, before the cut and behind it, device d holds piece d, D + d, 2 D + d,
# ... of all n D; its window are pieces d n to d n + n - 1. One all-to-all of what every device
# holds; where there are fewer pieces than devices, with room for one to each.


Axes = tuple[str, ...]


def to_windows(x: jax.Array, count: int, axes: Axes, devices: int) -> jax.Array:
    """From a cut behind `count` pieces to windows of as many: piece a of device d, which is piece
    a D + d of all, goes to device (a D + d) // count.
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


def from_windows(x: jax.Array, count: int, axes: Axes, devices: int) -> jax.Array:
    """Inverse of `to_windows`."""
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


# -- strips ------------------------------------------------------------------------------------
#
# Matrices of few rows dealt out in strips, whole columns of chunks: `[N, w]` each.
#
# So are they where there are fewer rows of chunks than devices. Rows, dealt out evenly, are
# handed on column by column (an all-to-all, in which every device makes room for as many strips
# as the fullest has). Where even the rows are fewer than the devices, columns are dealt out
# evenly, and neighbours hand one another what lies across. No strip has as many chunks as there
# are devices; where there are fewer strips than devices, some of these repeat what others do.


def strips_work(shape: Shape, width: int, devices: int) -> bool:
    """Whether there is a row for every device, or else a strip."""
    return _by_rows(shape, devices).works() or (
        shape[2] % devices == 0 and Deal(math.prod(shape[1:]), shape[1] * width, devices).works()
    )


def cut_strips(windows: Windows, x_LxT: jax.Array, shape: Shape, width: int) -> jax.Array:
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


def join_strips(windows: Windows, x_LxSxNxW: jax.Array, shape: Shape) -> jax.Array:
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


Shape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Moves one leaf between its own layout, equal windows, and units.

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

    def deal(self, unit: int) -> Deal:
        return Deal(self.size, unit, self.devices)

    def flat(self, x: jax.Array) -> jax.Array:
        """The leaf in windows: `[L, T]`, cut over T."""
        return self._over(self._flat, self.spec, self._along(1))(x)

    def lie(self, x_LxT: jax.Array) -> jax.Array:
        """Inverse of `flat`."""
        return self._over(self._lie, self._along(1), self.spec)(x_LxT)

    def matrix(self, x: jax.Array, shape: Shape) -> jax.Array:
        """The leaf as `[L, N, M]`, cut along rows if they divide over the devices, else columns."""
        return self._stack(shape).lie(self.flat(x))

    def leaf(self, x_LxNxM: jax.Array) -> jax.Array:
        """Inverse of `matrix`."""
        return self.lie(self._stack(x_LxNxM.shape).flat(x_LxNxM))

    def matrix_axis(self, shape: Shape) -> int | None:
        """The axis of `[L, N, M]` that `matrix` cuts; None where neither divides."""
        return next((i for i in (1, 2) if shape[i] % self.devices == 0), None)

    def _stack(self, shape: Shape) -> Windows:
        return self.cut_along(shape, self.matrix_axis(shape))

    def cut_along(self, shape: tuple[int, ...], axis: int) -> Windows:
        """Of `[L, ...]` that the same devices cut along one axis."""
        return Windows(tuple(shape), True, self.layers, ((axis, self.axes, self.devices),))

    def units(self, x_LxT: jax.Array, unit: int) -> jax.Array:
        """`[L, D each, w]`, cut over units; the last value of the leaf fills its last unit up."""
        along, deal = self._along(1), self.deal(unit)
        return self._over(lambda x: self._to_units(x, deal), along, along)(x_LxT)

    def join(self, x_LxUxW: jax.Array) -> jax.Array:
        """Inverse of `units`."""
        along, deal = self._along(1), self.deal(x_LxUxW.shape[2])
        return self._over(lambda x: self._from_units(x, deal), along, along)(x_LxUxW)

    def share(self, x_LxUxW: jax.Array, shares: Deal) -> jax.Array:
        """`units` dealt out again, each device its own to some of the `shares`, `[L, S each, w]`.

        Args:
          shares: of the same units, over a multiple of the devices.
        """
        own = shares.slots.reshape(self.devices, -1) - self.deal(x_LxUxW.shape[2]).starts[:-1, None]
        return self.on_each(lambda x: x[:, jnp.asarray(own)[self._number()]])(x_LxUxW)

    def unshare(self, x_LxSxW: jax.Array, shares: Deal) -> jax.Array:
        """Inverse of `share`."""
        room = shares.slots.size // self.devices
        at = (
            shares.filled[self.deal(x_LxSxW.shape[2]).slots]
            - room * np.arange(self.devices)[:, None]
        )
        return self.on_each(lambda x: x[:, jnp.asarray(at)[self._number()]])(x_LxSxW)

    def real(self, unit: int) -> jax.Array:
        """Bool `[D each, w]`: which values of `units` are the leaf's, and not filling."""
        deal = self.deal(unit)

        def local():
            d = self._number()
            at = jnp.arange(deal.each * unit, dtype=jnp.int32)
            left = deal.size - jnp.asarray(deal.starts)[d] * unit
            held = jnp.asarray(deal.held)[d] * unit
            return (at < jnp.minimum(held, left)).reshape(deal.each, unit)

        return self._over(local, (), P(self.axes))()

    def drop(self, x: jax.Array, unit: int, turned: bool = False) -> jax.Array:
        """`[L, D each n, ...]`, n entries a unit, without those of filling: `[L, U n, ...]`.

        Nothing moves where units divide over the devices. Else the last axis is cut in place of
        that of the units, where it divides (an all-to-all); where not, every device gets all.

        Args:
          turned: order them by entry, not by unit: `[L, n U, ...]`.
        """
        deal = self.deal(unit)
        rows, n = deal.devices * deal.each, x.shape[1] // (deal.devices * deal.each)
        if deal.count % deal.devices == 0 and not (turned and n > 1):
            return x
        swap = self._swaps(x.shape)

        def local(x):
            if swap:
                x = jax.lax.all_to_all(x, self.axes, x.ndim - 1, 1, tiled=True)
            else:
                x = jax.lax.all_gather(x, self.axes, axis=1, tiled=True)
            kept = x.reshape(x.shape[0], rows, n, *x.shape[2:])[:, deal.filled]
            kept = kept.swapaxes(1, 2) if turned else kept
            return kept.reshape(x.shape[0], -1, *x.shape[2:])

        return self._over(local, self._along(1), self._along(x.ndim - 1 if swap else None))(x)

    def fill(self, x: jax.Array, unit: int, turned: bool = False) -> jax.Array:
        """Inverse of `drop`; what fills up repeats other units."""
        deal = self.deal(unit)
        n, slots = x.shape[1] // deal.count, deal.slots
        if deal.count % deal.devices == 0 and not (turned and n > 1):
            return x
        swap = self._swaps(x.shape)

        def local(x):
            own = slots.reshape(-1) if swap else jnp.asarray(slots)[self._number()]
            order = (n, deal.count) if turned else (deal.count, n)
            x = x.reshape(x.shape[0], *order, *x.shape[2:])
            x = (x.swapaxes(1, 2) if turned else x)[:, own]
            x = x.reshape(x.shape[0], -1, *x.shape[3:])
            return jax.lax.all_to_all(x, self.axes, 1, x.ndim - 1, tiled=True) if swap else x

        return self._over(local, self._along(x.ndim - 1 if swap else None), self._along(1))(x)

    def on_each(self, fn: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """`fn` of every device's part of `[L, ...]`, cut over the second axis before and after."""
        return self._over(fn, self._along(1), self._along(1))

    def left(self, shape: Shape) -> Windows | None:
        """Of what `drop` has left, of this shape; None where every device has all of it."""
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
        """Of this device's window."""
        return jax.lax.axis_index(self.axes)

    def _rounds(self) -> list[tuple[int, Axes, int]]:
        """Of every cut: how many pieces of the leaf a device holds, and the devices."""
        lead, counts, done = int(self.lead), [], 1
        for dim, axes, n in self.cuts:
            counts.append((math.prod(self.shape[lead:dim]) // done, axes, n))
            done *= n
        return counts

    def _flat(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0] if self.lead else 1, -1)
        for count, axes, n in self._rounds():
            x = to_windows(x, count, axes, n)
        return x

    def _lie(self, x: jax.Array) -> jax.Array:
        for count, axes, n in reversed(self._rounds()):
            x = from_windows(x, count, axes, n)
        shape = list(self.shape)
        for dim, _, n in self.cuts:
            shape[dim] //= n
        if self.lead:
            shape[0] = x.shape[0]
        return x.reshape(shape)

    def _to_units(self, x: jax.Array, deal: Deal) -> jax.Array:
        before, behind = deal.before, deal.behind
        wide = [self._from_neighbour(x[:, x.shape[1] - before :], 1), x]
        wide.append(self._from_neighbour(x[:, :behind], -1))
        x = jnp.concatenate(wide, axis=1)
        # Behind the last device's window there is nothing: its last value, again and again.
        end = before + deal.size // deal.devices
        room = deal.each * deal.unit + before + int(deal.shifts[:-1].max()) - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, max(room, 0))))
        at = jnp.arange(x.shape[1])[None]
        beyond = (self._number() == deal.devices - 1) & (at >= end)
        x = jnp.where(beyond, x[:, end - 1 : end], x)
        start = before + jnp.asarray(deal.shifts)[self._number()]
        x = jax.lax.dynamic_slice_in_dim(x, start, deal.each * deal.unit, axis=1)
        return x.reshape(x.shape[0], deal.each, deal.unit)

    def _from_units(self, x: jax.Array, deal: Deal) -> jax.Array:
        x, d = x.reshape(x.shape[0], -1), self._number()
        early, late = deal.early, deal.late
        end = jnp.asarray(deal.held)[d] * deal.unit
        last = jax.lax.dynamic_slice_in_dim(x, end - early, early, axis=1)
        first = self._from_neighbour(x[:, :late], -1)
        x = jnp.concatenate([self._from_neighbour(last, 1), x, jnp.zeros_like(first)], axis=1)
        x = jax.lax.dynamic_update_slice_in_dim(x, first, early + end, axis=1)
        start = early - jnp.asarray(deal.shifts)[d]
        return jax.lax.dynamic_slice_in_dim(x, start, deal.size // deal.devices, axis=1)

    def _from_neighbour(self, x: jax.Array, step: int) -> jax.Array:
        """What the device `step` windows before has; zeros where there is none."""
        if x.shape[1] == 0:
            return x
        at = self._in_mesh()
        pairs = [(at[d], at[d + step]) for d in range(len(at)) if 0 <= d + step < len(at)]
        return jax.lax.ppermute(x, self.axes, pairs)

    def _in_mesh(self) -> list[int]:
        """Of every window its device's number, where axes are ordered as in the mesh.

        So `ppermute` counts, in whatever order it is given axes; other collectives do not.
        """
        sizes = jax.sharding.get_abstract_mesh().shape
        ordered = [axis for axis in sizes if axis in self.axes]
        numbers = np.arange(self.devices).reshape([sizes[axis] for axis in ordered])
        return numbers.transpose([ordered.index(axis) for axis in self.axes]).reshape(-1).tolist()
