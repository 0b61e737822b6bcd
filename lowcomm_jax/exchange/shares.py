"""Moves payloads between regions as flat buffers, of which each device moves its own share.

In: trees of leaves `[R, ...]` and their layouts inside a region. Out: every region's payload
everywhere (`gather`), one slice of every region's (`exchange_slices`), or the result of a
collective on the buffers (`run_on_shares`). `Packing` has the steps one by one, for callers that
run other work between a collective and the use of its result.

Devices of a region that hold the same values cut them into shares. One payload a region therefore
crosses between regions, however many devices the region has. Padding comes on top: for each dtype
and layout in the payload, fewer values than a region has devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.mesh.regions import (
    AXES,
    REGION,
    Regions,
    join_shares,
    share_of,
    take_share,
    weighted_sum,
)

PyTree = Any
Axes = tuple[str | None, ...]
_INSIDE = AXES[1:]


@dataclasses.dataclass(frozen=True)
class Packing:
    """Packs a tree of payloads into flat buffers, and unpacks it.

    A buffer has the first `lead` axes of the leaves, then the shares of all devices of a region
    side by side. There is one for each dtype and layout.

    Attributes:
      like: the tree, arrays or shapes, leaves `[R, ...]`.
      specs: `PartitionSpec` of each leaf behind its first `lead` axes.
      lead: number of leading axes that the buffers keep, the region axis included.
      one_buffer: make one buffer of all. Where dtypes differ it is of bytes, or, with a `lead` of
        2, of words (4 bytes, the last one filled up). Compilers let work run beside one collective
        where they do not beside several. Those of TPUs let it run beside an all-to-all of words and
        a gather of bytes, and not the other way round.
    """

    regions: Regions
    like: PyTree
    specs: PyTree
    lead: int = 1
    one_buffer: bool = False

    def pack(self, tree_R: PyTree) -> list[jax.Array]:
        """Buffers of every device's own share, cut over the regions (traced)."""
        front = (REGION, *(None,) * (self.lead - 1))
        leaves = [x for x in jax.tree.leaves(tree_R) if x.size]

        def pack(leaves):
            buffers = _pack(leaves, self._idle, self.lead)
            return _join(buffers, self._word) if self.one_buffer else buffers

        given = [P(*front, *spec) for spec in self._inner]
        return _mapped(self.regions, pack, (given,), P(*front, _INSIDE))(leaves)

    def unpack(self, buffers: Sequence[jax.Array], front: Axes) -> PyTree:
        """The tree of buffers whose first axes may have other lengths than those of `pack`.

        Args:
          front: mesh axis of each of the first `lead` axes; None = the same in every region.
        """
        like = jax.tree.leaves(self.like)
        own = [
            jax.ShapeDtypeStruct(self.regions.sharding(*front, *s).shard_shape(x.shape), x.dtype)
            for x, s in zip((x for x in like if x.size), self._inner)
        ]

        def unpack(buffers):
            if self.one_buffer:
                buffers = _split(buffers[0], _sizes(own, self._idle, self.lead))
            return _unpack(buffers, own, self._idle, self.lead)

        made = [P(*front, *spec) for spec in self._inner]
        leaves = _mapped(self.regions, unpack, (P(*front, _INSIDE),), made)(list(buffers))
        full, lead = iter(leaves), buffers[0].shape[: self.lead]
        empty = (jnp.zeros((*lead, *x.shape[self.lead :]), x.dtype) for x in like)
        return jax.tree.structure(self.like).unflatten(
            [next(full) if x.size else each for x, each in zip(like, empty)]
        )

    @property
    def _word(self) -> int:
        return 4 if self.lead == 2 else 1

    @property
    def _inner(self) -> list[P]:
        """Of the leaves that have values; the others do not travel."""
        specs = jax.tree.structure(self.like).flatten_up_to(self.specs)
        return [spec for x, spec in zip(jax.tree.leaves(self.like), specs) if x.size]

    @property
    def _idle(self) -> list[tuple[str, ...]]:
        return [self.regions.idle_axes(spec) for spec in self._inner]


def run_on_shares(
    regions: Regions,
    tree_R: PyTree,
    specs: PyTree,
    move: Callable[..., Sequence[list[jax.Array]]],
    *args: Any,
) -> list[PyTree]:
    """Run the collective `move` on the buffers of a tree, under `shard_map` over all axes.

    Args:
      tree_R: leaves `[R, ...]`.
      specs: `PartitionSpec` of each leaf behind the region axis.
      move: `(buffers, *args) -> results`, each a list of buffers like the ones it got, `[L, M]` (L
        regions of a slot).
      args: arrays, the same on all devices.

    Returns:
      Trees like `tree_R`, one for each result.
    """
    packing, cut = Packing(regions, tree_R, specs), P(REGION, _INSIDE)
    given = (cut, *(P() for _ in args))
    found = _mapped(regions, move, given, cut)(packing.pack(tree_R), *args)
    return [packing.unpack(buffers, (REGION,)) for buffers in found]


def gather(regions: Regions, tree_R: PyTree, specs: PyTree) -> PyTree:
    """Hand every region all payloads: leaves `[R, ...]`, replicated over the region axis."""
    if regions.slots == 1:
        return tree_R
    packing = Packing(regions, tree_R, specs)
    return packing.unpack(gather_buffers(regions, packing.pack(tree_R)), (None,))


def gather_buffers(regions: Regions, buffers: list[jax.Array]) -> list[jax.Array]:
    """Buffers `[R, M]` of all regions, everywhere: nothing but the collective (traced)."""

    def everyone(buffers):
        return [jax.lax.all_gather(x, REGION, axis=0, tiled=True) for x in buffers]

    return _mapped(regions, everyone, (P(REGION, _INSIDE),), P(None, _INSIDE))(buffers)


def exchange_slices(regions: Regions, tree_R: PyTree, specs: PyTree) -> PyTree:
    """Send region s slice s of every region: leaves `[R regions, R slices, ...]` swap axes.

    Args:
      specs: of the axes after these two.

    Returns:
      Leaves `[R slices, R regions, ...]`, sharded over the region axis.
    """
    if regions.slots == 1:
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree_R)
    packing = Packing(regions, tree_R, specs, lead=2)
    return unpack_slices(packing, swap_buffers(regions, packing.pack(tree_R)))


def swap_buffers(regions: Regions, buffers: list[jax.Array]) -> list[jax.Array]:
    """Hand slot s its slices of buffers `[R regions, slices, M]`, cut then over slices (traced)."""

    def swap(x):
        # Slot by slot; concatenation over slots is region order.
        return jax.lax.all_to_all(x, REGION, split_axis=1, concat_axis=0, tiled=True)

    given, made = P(REGION, None, _INSIDE), P(None, REGION, _INSIDE)
    return _mapped(regions, lambda xs: [swap(x) for x in xs], (given,), made)(buffers)


def unpack_slices(packing: Packing, buffers: list[jax.Array]) -> PyTree:
    """Unpack the result of `swap_buffers`: leaves `[R slices, R regions, ...]`."""
    tree = packing.unpack(buffers, (None, REGION))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)


# -- weighted sums of values as they are, each slot summing one slice -----------------------------


def cut_buffers(regions: Regions, buffers: list[jax.Array]) -> list[jax.Array]:
    """Buffers `[R, M]` as `[R, S, M / S]`, a slice for each region slot, filled up with zeros."""

    def cut(buffers):
        pads = [-x.shape[1] % regions.slots for x in buffers]
        whole = [jnp.pad(x, ((0, 0), (0, pad))) for x, pad in zip(buffers, pads)]
        return [x.reshape(x.shape[0], regions.slots, -1) for x in whole]

    return _mapped(regions, cut, (P(REGION, _INSIDE),), P(REGION, None, _INSIDE))(buffers)


def gather_sums(regions: Regions, buffers: list[jax.Array], weight_R: jax.Array):
    """Weighted sums of the slices that `swap_buffers` brought, everywhere: `[S, M / S]`."""

    def everyone(buffers, weight_R):
        sums = [weighted_sum(x, weight_R) for x in buffers]
        return [jax.lax.all_gather(x, REGION, axis=0, tiled=True) for x in sums]

    given = P(None, REGION, _INSIDE), P()
    return _mapped(regions, everyone, given, P(None, _INSIDE))(buffers, weight_R)


def join_buffers(regions: Regions, buffers: list[jax.Array]) -> list[jax.Array]:
    """Inverse of `cut_buffers`, of the sums: `[1, M]`, zeros at its end included."""

    def join(buffers):
        return [x.reshape(1, -1) for x in buffers]

    return _mapped(regions, join, (P(None, _INSIDE),), P(None, _INSIDE))(buffers)


def _mapped(regions: Regions, fn: Callable, given: Sequence[Any], made: Any) -> Callable:
    mesh = regions.mesh
    return jax.shard_map(fn, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)


def _kinds(leaves: Sequence[jax.Array], idle: Sequence[tuple[str, ...]]) -> list[tuple]:
    """Leaves that share a buffer: those of one dtype that are equal along the same axes."""
    return [(x.dtype, axes) for x, axes in zip(leaves, idle)]


def _pack(leaves, idle, lead: int) -> list[jax.Array]:
    """This device's share of all leaves of a kind side by side, for each kind in turn."""
    kinds, buffers = _kinds(leaves, idle), []
    for kind in dict.fromkeys(kinds):
        own = [x for x, one in zip(leaves, kinds) if one == kind]
        whole = jnp.concatenate([x.reshape(*x.shape[:lead], -1) for x in own], axis=lead)
        buffers.append(take_share(whole, kind[1]))
    return buffers


def _sizes(like, idle, lead: int) -> list[tuple[Any, int]]:
    """(dtype, values of a device's share) of each buffer of `_pack`."""
    sizes: dict[tuple, int] = {}
    for leaf, kind in zip(like, _kinds(like, idle)):
        sizes[kind] = sizes.get(kind, 0) + math.prod(leaf.shape[lead:])
    return [(dtype, share_of(size, axes)) for (dtype, axes), size in sizes.items()]


def _join(buffers: Sequence[jax.Array], word: int) -> list[jax.Array]:
    """One buffer of several, side by side; if dtypes differ, of unsigned words of this size."""
    if len({x.dtype for x in buffers}) == 1:
        return [jnp.concatenate(buffers, axis=-1)]
    joined = jnp.concatenate([_as(x, jnp.dtype("uint8")) for x in buffers], axis=-1)
    fill = [(0, 0)] * (joined.ndim - 1) + [(0, -joined.shape[-1] % word)]
    return [_as(jnp.pad(joined, fill), jnp.dtype(f"uint{8 * word}"))]


def _split(joined: jax.Array, sizes: Sequence[tuple[Any, int]]) -> list[jax.Array]:
    """Inverse of `_join`, for buffers of these (dtype, length)."""
    as_bytes = len({dtype for dtype, _ in sizes}) > 1
    joined = _as(joined, jnp.dtype("uint8")) if as_bytes else joined
    buffers, start = [], 0
    for dtype, size in sizes:
        end = start + size * (dtype.itemsize if as_bytes else 1)
        buffers.append(_as(jax.lax.slice_in_dim(joined, start, end, axis=-1), dtype))
        start = end
    return buffers


def _as(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The same bytes along the last axis, read as another dtype."""
    if x.dtype == dtype:
        return x
    if x.dtype == jnp.bool_:
        return x.astype(dtype)
    if dtype == jnp.bool_:
        return x != 0
    if x.dtype.itemsize < dtype.itemsize:
        x = x.reshape(*x.shape[:-1], -1, dtype.itemsize // x.dtype.itemsize)
        return jax.lax.bitcast_convert_type(x, dtype)
    cut = jax.lax.bitcast_convert_type(x, dtype)
    return cut if cut.ndim == x.ndim else cut.reshape(*x.shape[:-1], -1)


def _unpack(buffers, like, idle, lead: int) -> list[jax.Array]:
    """Inverse of `_pack`, for buffers whose first `lead` axes may have other lengths.

    Values of a buffer after its leaves are left out.
    """
    kinds, parts = _kinds(like, idle), {}
    for buffer, kind in zip(buffers, dict.fromkeys(kinds)):
        shapes = [x.shape[lead:] for x, one in zip(like, kinds) if one == kind]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        share = jax.lax.slice_in_dim(buffer, 0, share_of(int(ends[-1]), kind[1]), axis=lead)
        whole = join_shares(share, kind[1], int(ends[-1]))
        split = zip(jnp.split(whole, ends[:-1], axis=lead), shapes)
        parts[kind] = iter([part.reshape(*part.shape[:lead], *shape) for part, shape in split])
    return [next(parts[kind]) for kind in kinds]
