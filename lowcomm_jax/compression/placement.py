"""Where the units of a leaf are coded on the devices of a region.

In: a leaf's shape, how it is cut inside a region, and the unit of its codec. Out: a `Placement`,
the first that fits:

| the leaf is coded | when | cost |
| --- | --- | --- |
| as it lies | every device holds whole units | nothing |
| by rows, columns or layers | moved so, each holds whole units | an all-to-all a moved dimension |
| in shares, a matrix at a time | it has several units | `UnitShares`; the payload is gathered |
| gathered, a matrix at a time | | a gather; every device codes all |
| not at all | the matrix takes more than 128 MiB | refused |

In shares, devices that cut one side of a matrix give one another parts, so that each holds whole
units along the other side, or along this one, whichever takes less. Where that would be more than
the matrix, or many permutes, the matrix is gathered, and each device codes a share. Where both
sides are cut, the cut that leaves each device more is gathered first. A matrix of one unit, and a
codec that cannot (`LeafCodec.in_shares`) have no shares. For a two-shot a matrix above 128 MiB may
be in shares, too: where what a device then holds, the mean of a slice, and three times the payload
each take at most that.

Slices of a two-shot are of equal size on every device, so that few units a device fill them up. Of
the ways above, one where that adds a sixteenth or more, or anything at all to a leaf of at most 256
KiB, gives way to the next where it takes less (`Placement.deals_evenly`).

Of a pipeline stage the leaf is the stage's part. Where stages hold layers of a stack, units, slices
and keys are those of the whole stack. Of another leaf each codes its part as if it were all.

Functions of arrays are called within a `shard_map` over all axes of the mesh
(`Regions.on_devices`), with a device's part of a leaf.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.grid import Grid, Shape, Unit, first_column, grid_of, matrix_shape
from lowcomm_jax.compression.units import Matrix, fold
from lowcomm_jax.mesh.regions import AXES, axis_names
from lowcomm_jax.mesh.stages import STAGE, stage_axis

LARGEST = 1 << 27  # bytes of fp32 values that a device codes, or gathers, at once
SMALL = 1 << 18  # bytes of fp32 values; of such leaves slices are filled up as little as can be
PyTree = Any
Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one leaf is coded on the devices of a region.

    Attributes:
      shape: of the leaf, or of a stage's part.
      stacked: whether the first axis is that of the layers.
      unit: of the codec.
      slices: that a payload is cut into, for a two-shot reduction; 1 = it goes whole.
      cuts: mesh axes of more than one device that cut each dimension of the leaf as it lies.
      sizes: (axis, devices) of these axes.
      moves: (from dimension, mesh axes, to dimension), all-to-alls before coding.
      gathers: (dimension, mesh axes), gathered one matrix at a time while coding.
      shares: how the units are divided among the devices of the last of `gathers`, and how values
        come to them. None = every device codes all units.
      axes: mesh axes that cut (layers, down, across) while units are coded.
      stages: pipeline stages that each code a part or a copy of the leaf.
      stage: dimension that is cut over the stages; None = each has the whole.
    """

    shape: tuple[int, ...]
    stacked: bool
    unit: Unit
    slices: int = 1
    cuts: tuple[Axes, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    moves: tuple[tuple[int, Axes, int], ...] = ()
    gathers: tuple[tuple[int, Axes], ...] = ()
    shares: UnitShares | None = None
    axes: tuple[Axes, Axes, Axes] = ((), (), ())
    stages: int = 1
    stage: int | None = None

    @functools.cached_property
    def matrices(self) -> Shape:
        """(L, N, M)."""
        return matrix_shape(self.shape, self.stacked)

    @functools.cached_property
    def grid(self) -> Grid:
        return grid_of(self.shape, self.stacked, self.unit, self.slices)

    @property
    def alone(self) -> Placement:
        """The placement where one device holds all of the leaf, or of a stage's part."""
        return Placement(self.shape, self.stacked, self.unit, self.slices)

    @property
    def by_layers(self) -> bool:
        """Whether pipeline stages hold different layers of the leaf."""
        return self.stacked and self.stage == 0

    @property
    def all_layers(self) -> Placement:
        """The placement where one device holds all layers of such a leaf."""
        layers = self.stages * self.shape[0]
        return dataclasses.replace(self.alone, shape=(layers, *self.shape[1:]))

    @property
    def first_layer(self) -> jax.Array | int:
        """Number of the first layer of a device's part, counted over all stages."""
        axes = ((STAGE,) if self.by_layers else ()) + self.axes[0]
        held = self.matrices[0] // self.devices(self.axes[0])
        return jax.lax.axis_index(axes) * held if axes else 0

    def devices(self, axes: Sequence[str]) -> int:
        return math.prod(dict(self.sizes)[axis] for axis in axes)

    @functools.cached_property
    def coded_cuts(self) -> tuple[Axes, ...]:
        """Mesh axes that cut each dimension of the leaf while it is coded, moved."""
        cuts = list(self.cuts) + [()] * (len(self.shape) - len(self.cuts))
        for start, axes, end in self.moves:
            cuts[start], cuts[end] = (), (*cuts[end], *axes)
        return tuple(cuts)

    @property
    def spec(self) -> P:
        """`PartitionSpec` of the whole leaf, its stages' parts moved to where they are coded."""
        cuts = list(self.coded_cuts)
        if self.stage is not None:
            cuts[self.stage] = (STAGE, *cuts[self.stage])
        return P(*(axes or None for axes in cuts))

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of a device's part while the leaf is coded."""
        return tuple(n // self.devices(axes) for n, axes in zip(self.shape, self.coded_cuts))

    def enter(self, x: jax.Array) -> jax.Array:
        """A device's part of the leaf, moved to where it is coded."""
        for start, axes, end in self.moves:
            x = jax.lax.all_to_all(x, axes, split_axis=end, concat_axis=start, tiled=True)
        return x

    def leave(self, x: jax.Array) -> jax.Array:
        """Inverse of `enter`."""
        for start, axes, end in reversed(self.moves):
            x = jax.lax.all_to_all(x, axes, split_axis=start, concat_axis=end, tiled=True)
        return x

    # -- the part of a device as matrices `[l, n, m]` ----------------------------------------------

    def split(self, x: jax.Array) -> jax.Array:
        """The part as `[l, n, m]`, or, of a leaf that is gathered, as `[l, ...]`."""
        x = x if self.stacked else x[None]
        return x if self.gathers else self._matrices(x)

    def _matrices(self, x: jax.Array) -> jax.Array:
        """`[l, ...]` as `[l, n, m]`."""
        inner = x.shape[1:]
        if self.grid.flat:
            return x.reshape(x.shape[0], 1, math.prod(inner))
        at = first_column(self.shape, self.stacked) - int(self.stacked)
        return x.reshape(x.shape[0], math.prod(inner[:at]), math.prod(inner[at:]))

    def join(self, x: jax.Array) -> jax.Array:
        """Inverse of `split`."""
        return x.reshape(self.part)

    @property
    def _held(self) -> tuple[int, int]:
        """(n, m) of the matrices that a device codes."""
        sides = [self.grid.rows, self.grid.columns]
        sides = [n // self.devices(axes) for n, axes in zip(sides, self.axes[1:])]
        if self.shares is not None:
            at = self.shares.side - 1
            sides[at] = self.shares.each * self.sides[at]
        return sides[0], sides[1]

    def whole(self, x: jax.Array) -> jax.Array:
        """What is coded of what a device has, `[l, n, m]`: the same, its share, or all."""
        if not self.gathers:
            return x
        lead, shares = int(self.stacked), self.shares
        way = "gathered" if shares is None else shares.way
        for dim, axes in self.gathers if way == "gathered" else self.gathers[:-1]:
            x = jax.lax.all_gather(x, axes, axis=dim + 1 - lead, tiled=True)
        if shares is None:
            return x.reshape(x.shape[0], *self._held)
        share = self._held[shares.side - 1]
        if way == "gathered":
            return shares.take(self._matrices(x), share)
        x = x if way == "along" else x.reshape(self._with_one_axis(x.shape))
        divided, cut = self._traded
        if divided != cut:
            size = x.shape[divided]
            even = size + -size % shares.devices if way == "along" else share * shares.devices
            x = filled_up(x, divided, even)
            x = jax.lax.all_to_all(x, shares.axes, divided, cut, tiled=True)
        if way == "along":
            return shares.pass_on(self._matrices(x), share, self._shared_side)
        return x.reshape(x.shape[0], *self._held)

    def own(self, x_lxnxm: jax.Array) -> jax.Array:
        """Inverse of `whole`."""
        if not self.gathers:
            return x_lxnxm
        lead, shares, gathers = int(self.stacked), self.shares, self.gathers
        x, shape = x_lxnxm, [len(x_lxnxm), *self.shape[lead:]]
        if shares is not None and shares.way == "gathered":
            x = jax.lax.all_gather(x, shares.axes, axis=shares.side, tiled=True)
            x = jax.lax.slice_in_dim(x, 0, self._shared_side, axis=shares.side)
        elif shares is not None:
            *gathers, (dim, axes) = gathers
            divided, cut = self._traded
            if shares.way == "along":
                sides, size = list(shape), shape[divided]
                sides[divided] = -(-size // shares.devices)
                piece = self._shared_side // size * sides[divided]
                x = shares.pass_on(x, piece, self._shared_side)
            else:
                sides, size = list(self._with_one_axis(shape)), self._shared_side
                sides[divided] = x.shape[shares.side]
            x = x.reshape(sides)
            if divided != cut:
                x = jax.lax.all_to_all(x, axes, cut, divided, tiled=True)
                x = jax.lax.slice_in_dim(x, 0, size, axis=divided)
            shape[dim + 1 - lead] //= shares.devices
        x = x.reshape(shape)
        for dim, axes in gathers:
            size = self.shape[dim] // self.devices(axes)
            start = jax.lax.axis_index(axes) * size
            x = jax.lax.dynamic_slice_in_dim(x, start, size, dim + 1 - lead)
        return x

    def _with_one_axis(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of `[l, ...]`: the shape with one axis in place of those of the side that is shared."""
        first = first_column(self.shape, self.stacked) + 1 - int(self.stacked)
        if self.shares.side == 1:
            return (shape[0], math.prod(shape[1:first]), *shape[first:])
        return (*shape[:first], math.prod(shape[first:]))

    @property
    def _traded(self) -> tuple[int, int]:
        """Axes of `[l, ...]`: the one that is divided among devices, and the one that is cut.

        `along`: the first dimension of the side that is cut is divided. `across`: the other side,
        as one axis.
        """
        lead, at = int(self.stacked), first_column(self.shape, self.stacked)
        cut = self.gathers[-1][0]
        if self.shares.way == "along":
            return 1 + (at if cut >= at and not self.grid.flat else lead) - lead, 1 + cut - lead
        return (1, 2 + cut - at) if self.shares.side == 1 else (1 + at - lead, 1 + cut - lead)

    @property
    def _shared_side(self) -> int:
        """Length of the side that is divided into shares."""
        return (self.grid.rows, self.grid.columns)[self.shares.side - 1]

    @property
    def one_by_one(self) -> bool:
        """Whether matrices are coded one after the other: gathered ones, and large stacks."""
        held = self.devices(axis for axes in self.axes for axis in axes)
        several = self.matrices[0] // self.devices(self.axes[0]) > 1
        return several and (bool(self.gathers) or 4 * math.prod(self.matrices) > LARGEST * held)

    def each(self, fn: Callable, *args: PyTree) -> PyTree:
        """`fn` of leaves `[l, ...]`, one matrix after the other where that is needed."""
        if not self.one_by_one:
            return fn(*args)

        def one(given):
            return first(fn(*stacked(given)))

        return jax.lax.map(one, args)

    # -- units -------------------------------------------------------------------------------------

    @property
    def sides(self) -> tuple[int, int]:
        """(height, width) of a unit."""
        return self.grid.height, self.grid.width

    def to_units(self, x_lxnxm: jax.Array) -> jax.Array:
        return self.grid.to_units(x_lxnxm)

    def from_units(self, x: jax.Array) -> jax.Array:
        """Inverse of `to_units`: `[l, n, m]` without padding."""
        return self.grid.from_units(x, *self._held)

    def matrix(self) -> Matrix:
        """What a codec may ask about its matrices."""

        def held(x, axis):
            shares = self.shares
            return x if shares is None or axis != shares.side else shares.take(x)

        return self._matrix(None, self._real(held))

    def _matrix(self, select: Callable | None, real: jax.Array | None) -> Matrix:
        """select: `(units, axis)` -> those of a slice along that axis; None = all of them count."""

        def over(fold, x, in_parts=False):
            for axis in (2,) if self.unit.rows == "apart" else (2, 1):
                axes = self.axes[axis]
                # Of several numbers a unit each device folds some, and hands on their totals.
                dealt = bool(axes) and x.ndim > 3 and x.shape[3] % self.devices(axes) == 0
                if dealt:
                    x = jax.lax.all_to_all(x, axes, split_axis=3, concat_axis=axis, tiled=True)
                elif axes:
                    x = fold(x, axis) if in_parts else x
                    x = jax.lax.all_gather(x, axes, axis=axis, tiled=True)
                elif select is None and self.shares is not None and axis == self.shares.side:
                    x = self.shares.gather(x)
                x = fold(x if select is None else select(x, axis), axis)
                x = jax.lax.all_gather(x, axes, axis=3, tiled=True) if dealt else x
            return x

        def total(x):
            return over(fold, x)

        def largest(x):
            # In any order: of all units, without shares, one value a device is gathered.
            found = functools.partial(jnp.max, keepdims=True)
            return over(found, x, in_parts=select is None)

        return Matrix(total, largest, real)

    def _real(self, own_part: Callable) -> jax.Array | None:
        """`Matrix.real`; own_part: `(bool array, axis)` -> those of some units along that axis."""
        if not self.grid.padded:
            return None
        # A side that is padded is not cut, so that of a side that is cut all values are real.
        down, across = (
            x[:1] if axes else x for x, axes in zip(self.grid.real(), self.axes[1:], strict=True)
        )
        down, across = down[None, :, None, :, None], across[None, None, :, None, :]
        return own_part(down, 1) & own_part(across, 2)

    def array_spec(self, shape: Sequence[int]) -> P:
        """Layout of a payload array `[L, down, across, ...]`, or with 1 in place of these.

        shape: of the array on one device that codes all.
        """
        return P(*(axes if axes and n > 1 else None for n, axes in zip(shape, self.axes)))

    # -- slices of a two-shot reduction ------------------------------------------------------------
    #
    # Slice s of a payload has the units whose number along one axis of the grid is s modulo R.

    @functools.cached_property
    def _dealt(self) -> Dealt:
        """The axis that is dealt out: the one that is filled up least, of these the longest.

        Which one it is decides with what a unit is coded again, so it is a side of the grid, the
        same on any mesh and in any number of stages. Of units that are coded alone it may be the
        layers, and is the best one for what devices hold.
        """
        counts, regions = (self.grid.layers, self.grid.down, self.grid.across), self.slices
        held = [count // self.devices(axes) for count, axes in zip(counts, self.axes)]
        alone = self.unit.rows == "alone"
        filled = held if alone else counts
        sides = range(3) if alone else (1, 2)
        axis = min(sides, key=lambda i: (-filled[i] % regions / max(filled[i], 1), -filled[i]))
        devices, each = self.devices(self.axes[axis]), -(-held[axis] // regions)
        return Dealt(axis, counts[axis], devices, held[axis], each)

    @property
    def deals_evenly(self) -> bool:
        """Whether devices fill up slices as little as one device does.

        Of leaves above `SMALL`, or by less than a sixteenth.
        """
        fraction = self._dealt.fraction
        small = 4 * math.prod(self.matrices) <= SMALL
        little = not small and 16 * self.slices * fraction < 17
        return little or fraction <= self.alone._dealt.fraction

    @property
    def _start(self) -> jax.Array | int:
        axes = self.axes[self._dealt.axis]
        return jax.lax.axis_index(axes) * self._dealt.held if axes else 0

    def dealt_size(self, shape: Sequence[int]) -> int:
        """Entries of all slices of a payload array of this shape."""
        dealt, size = self._dealt, math.prod(shape)
        if shape[dealt.axis] != dealt.count or dealt.count == 0:
            return self.slices * size
        return size // dealt.count * dealt.devices * dealt.each * self.slices

    def deal(self, x: jax.Array) -> jax.Array:
        """A payload array in slices: `[l, down, across, ...]` -> `[R, ...]`.

        A slice has ceil(n / R) of a device's n units along the axis that is dealt out, the last one
        repeated where there are fewer. Arrays of a matrix go to every slice.
        """
        dealt, regions = self._dealt, self.slices
        axis, held, each = dealt.axis, dealt.held, dealt.each
        if x.shape[axis] != held or held == 0:
            return jnp.broadcast_to(x, (regions, *x.shape))
        x = jnp.moveaxis(x, axis, 0)
        if each * regions > held:
            x = jnp.concatenate([x, jnp.repeat(x[-1:], each * regions - held, 0)])
        x = x.reshape(each, regions, *x.shape[1:]).swapaxes(0, 1)
        x = jnp.roll(x, self._start, 0)
        return jnp.moveaxis(x, 1, axis + 1)

    def undeal(self, x_R: jax.Array) -> jax.Array:
        """Inverse of `deal`; arrays of a matrix get an entry for each unit along the dealt axis."""
        dealt = self._dealt
        axis = dealt.axis
        if x_R.shape[axis + 1] != dealt.each:
            # One entry of each slice: the same for all of its units.
            x_R = jnp.repeat(x_R, dealt.each, axis + 1)
        x_R = jnp.roll(x_R, -self._start, 0)
        x_R = jnp.moveaxis(x_R, axis + 1, 1).swapaxes(0, 1)
        x = x_R.reshape(x_R.shape[0] * x_R.shape[1], *x_R.shape[2:])
        return jnp.moveaxis(x[: dealt.held], 0, axis)

    def slice_matrix(self, number: jax.Array) -> Matrix:
        """`matrix` for the codec of the means of slice `number`: totals are those of the slice."""
        dealt, regions = self._dealt, self.slices
        axis, held, each = dealt.axis, dealt.held, dealt.each
        # Where the units of a slice stand, in the order of the grid, among what all devices hold of
        # it; the last place is empty.
        table = np.full((regions, -(-dealt.count // regions)), dealt.devices * each)
        at = np.arange(dealt.count)
        table[at % regions, at // regions] = at // held * each + at % held // regions

        def select(x, dim):
            if dim != axis:
                return x
            empty = jnp.zeros_like(jax.lax.slice_in_dim(x, 0, 1, axis=dim))
            return jnp.take(jnp.concatenate([x, empty], dim), jnp.asarray(table)[number], dim)

        def of_slice(x, dim):
            return self.deal(x)[number] if dim == axis and x.shape[dim] == held else x

        return self._matrix(select, self._real(of_slice))


class UnitShares(NamedTuple):
    """Equal shares of the units along a side of the grid, one a device of some mesh axes.

    The last shares may be filled up with further units, which `gather` cuts off.

    Attributes:
      axes, devices: mesh axes, and how many devices they have.
      side: 1 = down, 2 = across.
      count: units along it.
      way: how values come to their shares. `across`: the axes cut the other side, and an all-to-all
        divides this one. `along`: they cut this one, and pieces of it are passed on, after an
        all-to-all where it is cut inside. `gathered`: a device takes its share of the whole matrix.
      cost: what a device holds meanwhile, as a fraction of the matrix's values.
    """

    axes: Axes
    devices: int
    side: int
    count: int
    way: Literal["across", "along", "gathered"]
    cost: float

    @property
    def each(self) -> int:
        """Units of a share."""
        return -(-self.count // self.devices)

    def gather(self, x: jax.Array) -> jax.Array:
        """`[l, down, across, ...]` of all units, from a device's share."""
        x = jax.lax.all_gather(x, self.axes, axis=self.side, tiled=True)
        return jax.lax.slice_in_dim(x, 0, self.count, axis=self.side)

    def take(self, x: jax.Array, size: int | None = None, lead: int = 0) -> jax.Array:
        """A device's share.

        Args:
          size: its entries along the side; None = those of `each` units.
          lead: axes in front of `[l, down, across, ...]`.
        """
        axis, size = self.side + lead, self.each if size is None else size
        start = jax.lax.axis_index(self.axes) * size
        x = filled_up(x, axis, self.devices * size)
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    def pass_on(self, x: jax.Array, size: int, real: int) -> jax.Array:
        """Takes equal pieces along the side, one a device, and returns pieces of `size`.

        Device d gets the values from d * size on. Only the first `real` values count; in the piece
        that they end in, the last one is repeated. There is a collective permute for each small
        piece that a large one may cover.
        """
        axis, held, index = self.side, x.shape[self.side], jax.lax.axis_index(self.axes)
        small, large = sorted((held, size))

        def of_device(table, default):
            return jnp.asarray([table.get(d, default) for d in range(self.devices)])[index]

        buffer = jnp.zeros((*x.shape[:axis], size + 2 * small, *x.shape[axis + 1 :]), x.dtype)
        for number in range(-(-large // small) + 1):
            # The small piece with this number, among those that a large piece covers.
            pairs = [(d * large // small + number, d) for d in range(self.devices)]
            pairs = pairs if size > held else [(d, other) for other, d in pairs]
            # What is sent of a piece begins there, and here in the receiver's.
            there = {d: min(max(to * size - d * held, 0), held - small) for d, to in pairs}
            here = {to: d * held + there[d] - to * size for d, to in pairs}
            pairs = [
                (d, to) for d, to in pairs if max(d, to) < self.devices and -small < here[to] < size
            ]
            if not pairs:
                continue
            here = {to: here[to] + small for _, to in pairs}
            sent = x
            if small < held:
                sent = jax.lax.dynamic_slice_in_dim(x, of_device(there, 0), small, axis)
            came = jax.lax.ppermute(sent, *self._numbered(pairs))
            # Where nothing comes, zeros are put behind the piece.
            at = of_device(here, size + small)
            buffer = jax.lax.dynamic_update_slice_in_dim(buffer, came, at, axis)
        piece = jax.lax.slice_in_dim(buffer, small, small + size, axis=axis)
        counts = {d: min(max(real - d * size, 0), size) for d in range(self.devices)}
        if min(counts.values()) == size:
            return piece
        count = of_device(counts, size)
        last = jax.lax.dynamic_slice_in_dim(piece, jnp.maximum(count - 1, 0), 1, axis)
        places = jax.lax.broadcasted_iota(jnp.int32, piece.shape, axis)
        return jnp.where(places < count, piece, last)

    def _numbered(self, pairs: Sequence[tuple[int, int]]) -> tuple[Axes, list[tuple[int, int]]]:
        """Axes in the mesh's order, and the pairs as devices are numbered along them.

        `ppermute` numbers them so, whatever the order of its axes.
        """
        ordered = tuple(sorted(self.axes, key=AXES.index))
        numbers = np.arange(self.devices).reshape([jax.lax.axis_size(a) for a in ordered])
        numbers = numbers.transpose([ordered.index(a) for a in self.axes]).reshape(-1).tolist()
        return ordered, [(numbers[come], numbers[to]) for come, to in pairs]


def filled_up(x: jax.Array, axis: int, size: int) -> jax.Array:
    """x with `size` entries along an axis; the last one is repeated."""
    width = [(0, (size - x.shape[axis]) * (i == axis)) for i in range(x.ndim)]
    return jnp.pad(x, width, mode="edge") if size > x.shape[axis] else x


class Dealt(NamedTuple):
    """The axis of a grid that is dealt out to slices.

    Attributes:
      axis: 0 = layers, 1 = down, 2 = across.
      count: units along it.
      devices: that hold equal parts of them.
      held: units of each device.
      each: units of a slice on each device.
    """

    axis: int
    count: int
    devices: int
    held: int
    each: int

    @property
    def fraction(self) -> float:
        """Of all units along the axis those that a slice has, on all devices."""
        return self.devices * self.each / max(self.count, 1)


def stacked(tree: PyTree) -> PyTree:
    """One matrix as a stack of one."""
    return jax.tree.map(lambda x: x[None], tree)


def first(tree: PyTree) -> PyTree:
    """Inverse of `stacked`."""
    return jax.tree.map(lambda x: x[0], tree)


def place(
    unit: Unit,
    shape: Sequence[int],
    is_stacked: bool,
    spec: P,
    sizes: Mapping[str, int],
    staged: bool = False,
    in_shares: bool = False,
    nbytes: int = 0,
    slices: int = 1,
) -> Placement:
    """Choose how a leaf is coded (see the module).

    Args:
      unit: of its codec.
      shape: of the whole leaf.
      is_stacked: whether its first axis is that of the layers.
      spec: how it lies inside a region.
      sizes: devices of each mesh axis.
      staged: whether pipeline stages code their own parts.
      in_shares: of its codec (`LeafCodec.in_shares`).
      nbytes: of the payload, read where it is in slices.
      slices: see `Placement`.

    Raises:
      ValueError: a matrix that would have to be gathered is too large.
    """
    given = unit, tuple(shape), is_stacked, spec, tuple(sizes.items())
    return _place(*given, staged, in_shares, nbytes, slices)


@functools.lru_cache(maxsize=4096)
def _place(
    unit: Unit,
    shape: tuple[int, ...],
    is_stacked: bool,
    spec: P,
    axes_sizes: tuple[tuple[str, int], ...],
    staged: bool,
    in_shares: bool,
    nbytes: int,
    slices: int,
) -> Placement:
    sizes, names = dict(axes_sizes), [axis_names(entry) for entry in spec]
    names += [()] * (len(shape) - len(names))
    stages = sizes[STAGE] if staged else 1
    stage, shape = part_of_stage(shape, spec, stages)
    inside = [tuple(a for a in axes if a != STAGE and sizes[a] > 1) for axes in names]
    used = [(axis, sizes[axis]) for axes in inside for axis in axes]
    given = shape, is_stacked, unit, slices, tuple(inside), tuple(used)
    plain = Placement(*given, stages=stages, stage=stage)
    cuts = {dim: axes for dim, axes in enumerate(inside) if axes}
    first_way = None
    for way in _ways(plain, cuts):
        if way.deals_evenly:
            return way
        first_way = first_way or way
    gathers = [(d, a) for d, a in cuts.items() if not (is_stacked and d == 0)]
    layers, shares = cuts.get(0, ()) if is_stacked else (), None
    if in_shares and gathers:
        gathers.sort(key=lambda cut: _shares(plain, *cut).cost, reverse=True)
        smallest = _shares(plain, *gathers[-1])
        shares = smallest if smallest.count > 1 else None
    given = {"axes": (layers, (), ()), "gathers": tuple(gathers), "shares": shares}
    gathered = dataclasses.replace(plain, **given)
    count, n, m = plain.matrices
    together = count if unit.rows == "joined" else 1  # such units are coded all at once
    held = 4 * together * n * m
    if shares is not None and slices > 1:
        # What a device holds of one; the mean of a slice; the payload, its slices and their buffer.
        held = min(held, max(held * shares.cost, 4 * count * n * m / slices, 3 * nbytes))
    too_large = held > LARGEST
    if first_way is not None and (too_large or not gathered.deals_evenly):
        return first_way
    if too_large:
        raise ValueError(
            f"a leaf {list(shape)} cut as {P(*(a or None for a in inside))}: no device holds whole "
            f"units of {plain.sides[0]} x {plain.sides[1]} values, and a matrix of more than "
            f"{LARGEST >> 20} MiB is not gathered: choose specs that cut it into whole rows"
        )
    return gathered


def part_of_stage(
    shape: tuple[int, ...], spec: P, stages: int
) -> tuple[int | None, tuple[int, ...]]:
    """(the dimension that is cut over the stages, or None; shape of a stage's part of a leaf)."""
    stage = stage_axis(spec) if stages > 1 else None
    if stage is None:
        return None, shape
    return stage, (*shape[:stage], shape[stage] // stages, *shape[stage + 1 :])


def _ways(plain: Placement, cuts: dict[int, Axes]) -> Iterator[Placement]:
    """As the leaf lies, then moved to rows, columns or layers: where devices hold whole units."""
    if (axes := _fitting(plain, cuts)) is not None:
        yield dataclasses.replace(plain, axes=axes)
    shape, is_stacked = plain.shape, plain.stacked
    lead, at = int(is_stacked), first_column(shape, is_stacked)
    for to in dict.fromkeys((lead, at, 0) if is_stacked else (lead, at)):
        moved = {d: a for d, a in cuts.items() if d != to and not (is_stacked and d == 0)}
        joined = (*cuts.get(to, ()), *(axis for axes in moved.values() for axis in axes))
        after = {to: joined} | ({0: cuts[0]} if is_stacked and 0 in cuts and to else {})
        fits = shape[to] % plain.devices(joined) == 0
        if fits and (axes := _fitting(plain, after)) is not None:
            moves = tuple((dim, axes, to) for dim, axes in moved.items())
            yield dataclasses.replace(plain, axes=axes, moves=moves)


def _shares(plain: Placement, dim: int, axes: Axes) -> UnitShares:
    """The shares of the least cost among the devices that cut a dimension."""
    grid, shape, devices = plain.grid, plain.shape, plain.devices(axes)
    lead, at = int(plain.stacked), first_column(plain.shape, plain.stacked)
    own = 2 if dim >= at or grid.flat else 1

    def shares(side, way, cost):
        count = max((grid.down, grid.across)[side - 1], 1)
        each = -(-count // devices) / count
        return UnitShares(axes, devices, side, count, way, cost + each)

    piece = max(shape[at if dim >= at and not grid.flat else lead], 1)
    piece = -(-piece // devices) / piece
    ways = [] if grid.flat else [shares(3 - own, "across", 0.0)]
    share = shares(own, "along", 0.0).cost
    if piece / 4 <= share <= 4 * piece:  # otherwise it would take many permutes
        small, large = sorted((share, piece))
        ways.append(shares(own, "along", large + 2 * small - share))
    ways += [shares(side, "gathered", 1.0) for side in ((2,) if grid.flat else (1, 2))]
    return min(ways, key=lambda way: (way.count == 1, way.cost))


def _fitting(plain: Placement, cuts: dict[int, Axes]) -> tuple[Axes, Axes, Axes] | None:
    """Axes of (layers, down, across) where every device then holds whole units, else None."""
    lead, at = int(plain.stacked), first_column(plain.shape, plain.stacked)
    grid, shape = plain.grid, plain.shape
    for dim, axes in cuts.items():
        if dim not in (*range(lead), lead, at) or shape[dim] % plain.devices(axes):
            return None
    rows, columns = cuts.get(lead, ()) if at > lead else (), cuts.get(at, ())
    if grid.flat:
        if columns and plain.matrices[1] > 1:
            return None
        rows, columns = (), (*rows, *columns)
    sides = (
        (grid.rows, grid.height, grid.down, rows),
        (grid.columns, grid.width, grid.across, columns),
    )
    for n, size, count, axes in sides:
        if axes and (n != size * count or n // plain.devices(axes) % size):
            return None
    return (cuts.get(0, ()) if lead else (), rows, columns)
