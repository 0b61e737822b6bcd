"""Selected entries of leaves, taken and overwritten where the leaves lie inside a region.

In: leaves `[R, ...]`, and for each band of a leaf (`bands`) the indices of some of its entries, the
same in every region. Out: their values side by side (`take_entries`), or the leaves with new values
in these places (`put_entries`).

Where a region's leaves are cut over its devices, every device reads and writes its own part. To
take, the devices of a region sum the values they found (zeros elsewhere), so that only selected
values cross inside the region, never a leaf. To put, nothing crosses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lowcomm_jax.mesh.regions import REGION, Regions, axis_names

LARGEST = 2**31 - 2**15  # indices are int32, those of empty places behind a leaf's end, too


def bands(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of a leaf's rows (indices of its first axis) that int32 indices reach: (first, rows).

    A leaf of at most `LARGEST` entries is one band. Larger ones have as few as reach it, all but
    the last of equally many rows. [] = a row alone is too large.

    >>> bands((80, 8192, 8192)), bands((4,)), bands((3, 2**31)), bands(())
    ([(0, 27), (27, 27), (54, 26)], [(0, 4)], [], [(0, 1)])
    """
    rows, each = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if rows * each <= LARGEST:
        return [(0, rows)]
    if each > LARGEST:
        return []
    number = -(-rows // (LARGEST // each))
    height = -(-rows // number)
    return [(first, min(height, rows - first)) for first in range(0, rows, height)]


def band_sizes(shape: Sequence[int]) -> list[int]:
    """Entries of each of the `bands` of a leaf."""
    return [rows * math.prod(shape[1:]) for _, rows in bands(shape)]


def take_entries(
    regions: Regions,
    leaves_R: Sequence[jax.Array],
    indices: Sequence[jax.Array],
    specs: Sequence[P],
) -> jax.Array:
    """Values of the selected entries, band after band: float32 `[R, N]` (traced).

    Args:
      leaves_R: `[R, ...]`, any float dtype.
      indices: of each band of each leaf int32 `[n]`, in one region's flattened band. An index past
        its end gives 0.
      specs: `PartitionSpec` of each leaf inside a region.
    """

    def take(xs, indices):
        of_leaves = _of_leaves(xs, indices, specs, regions)
        return jnp.concatenate(
            [
                _taken(x, _places(i, x, spec, regions), _cut(spec, regions))
                for x, i, spec in zip(xs, of_leaves, specs)
            ],
            axis=1,
        )

    return _everywhere(regions, take, (_lie(specs), P()), P(REGION))(list(leaves_R), list(indices))


def put_entries(
    regions: Regions,
    leaves_R: Sequence[jax.Array],
    indices: Sequence[jax.Array],
    specs: Sequence[P],
    values: jax.Array,
    adopts: jax.Array,
) -> list[jax.Array]:
    """The leaves with new values in the selected entries that adopt them (traced).

    Args:
      leaves_R, indices, specs: see `take_entries`; empty places are left out.
      values: float32, band after band, `[N]` for all regions or `[R, N]`.
      adopts: bool, which regions, `[R]`, or which entries of which regions, `[R, N]`.
    """

    def put(xs, indices, values, adopts):
        new, end = [], 0
        for x, of_leaf, spec in zip(xs, _of_leaves(xs, indices, specs, regions), specs):
            start, end = end, end + sum(i.shape[0] for i in of_leaf)
            part = jax.lax.slice_in_dim(values, start, end, axis=-1)
            who = adopts if adopts.ndim == 1 else adopts[:, start:end]
            new.append(_written(x, _places(of_leaf, x, spec, regions), part, who))
        return new

    given = (_lie(specs), P(), P() if values.ndim == 1 else P(REGION), P(REGION))
    mapped = _everywhere(regions, put, given, _lie(specs))
    return mapped(list(leaves_R), list(indices), values, adopts)


def _lie(specs: Sequence[P]) -> list[P]:
    return [P(REGION, *spec) for spec in specs]


def _everywhere(regions: Regions, fn, given, made):
    if regions.mesh.size == 1:
        return fn
    # Sums over the axes that cut a leaf make a value equal along all axes inside the region.
    return jax.shard_map(fn, mesh=regions.mesh, in_specs=given, out_specs=made, check_vma=False)


def _cut(spec: Sequence, regions: Regions) -> list[tuple[str, ...]]:
    """Of each dimension the axes of several devices that it is cut over."""
    size = regions.mesh.shape
    return [tuple(a for a in axis_names(entry) if size[a] > 1) for entry in spec]


def _whole(x: jax.Array, spec: P, regions: Regions) -> list[int]:
    """The shape of one region's leaf, of which this device has the part `x`, `[R, ...]`."""
    size, cut = regions.mesh.shape, _cut(spec, regions)
    cut += [()] * (x.ndim - 1 - len(cut))
    return [n * math.prod(size[a] for a in names) for n, names in zip(x.shape[1:], cut)]


def _of_leaves(xs, indices, specs, regions: Regions) -> list[list[jax.Array]]:
    """The indices of each leaf's bands."""
    rest = iter(indices)
    return [[next(rest) for _ in bands(_whole(x, s, regions))] for x, s in zip(xs, specs)]


def _places(
    of_leaf: Sequence[jax.Array], x: jax.Array, spec: P, regions: Regions
) -> tuple[jax.Array, list[jax.Array]]:
    """(whether this device holds an entry, its coordinates in the device's part of the leaf).

    Coordinates of entries that it does not hold lie outside of its part.
    """
    local, whole = x.shape[1:], _whole(x, spec, regions)
    cut = _cut((*spec, *(None,) * (len(local) - len(spec))), regions)
    runs = zip(of_leaf, bands(whole))
    found = [_coordinates(index, first, rows, whole) for index, (first, rows) in runs]
    coordinates = [jnp.concatenate(each) for each in zip(*found)]
    here = []
    for k, names in enumerate(cut):
        if names:
            coordinates[k] -= jax.lax.axis_index(names) * local[k]
    for coordinate, n in zip(coordinates, local or (1,)):
        here.append((coordinate >= 0) & (coordinate < n))
    holds = jnp.stack(here).all(axis=0)
    coordinates[0] = jnp.where(holds, coordinates[0], (local or (1,))[0])
    return holds, coordinates


def _coordinates(index: jax.Array, first: int, rows: int, whole: Sequence[int]) -> list[jax.Array]:
    """Those in a leaf of shape `whole` of a band's entries; behind the leaf's end those of none."""
    coordinates = []
    for n in reversed(whole[1:]):
        coordinates.insert(0, index % n)
        index = index // n
    # A scalar has one entry, at 0.
    end = whole[0] if whole else 1
    return [jnp.where(index < rows, first + index, end), *coordinates]


def _taken(x: jax.Array, places, cut: list[tuple[str, ...]]) -> jax.Array:
    holds, coordinates = places
    x = x if x.ndim > 1 else x[:, None]
    inside = [jnp.where(holds, c, 0) for c in coordinates]
    found = jnp.where(holds, x[(slice(None), *inside)].astype(jnp.float32), 0.0)
    axes = tuple(axis for names in cut for axis in names)
    return jax.lax.psum(found, axes) if axes else found


def _written(x: jax.Array, places, values: jax.Array, adopts: jax.Array) -> jax.Array:
    holds, coordinates = places
    whole = x if x.ndim > 1 else x[:, None]
    inside = [jnp.where(holds, c, 0) for c in coordinates]
    old = whole[(slice(None), *inside)]
    adopts = adopts[:, None] if adopts.ndim == 1 else adopts
    values = values.astype(x.dtype)
    new = jnp.where(adopts, values[None] if values.ndim == 1 else values, old)
    return whole.at[(slice(None), *coordinates)].set(new, mode="drop").reshape(x.shape)
