"""Selected entries of leaves, taken and overwritten where the leaves lie inside a region.

In: leaves `[R, ...]`, and for each leaf the indices of some of its entries, the same in every
region. Out: their values side by side (`take_entries`), or the leaves with new values in these
places (`put_entries`).

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


def take_entries(
    regions: Regions,
    leaves_R: Sequence[jax.Array],
    indices: Sequence[jax.Array],
    specs: Sequence[P],
) -> jax.Array:
    """Values of the selected entries, leaf after leaf: float32 `[R, N]` (traced).

    Args:
      leaves_R: `[R, ...]`, any float dtype.
      indices: of each leaf int32 `[n]`, in one region's flattened leaf. An index past its end gives
        0.
      specs: `PartitionSpec` of each leaf inside a region.
    """

    def take(xs, indices):
        return jnp.concatenate(
            [
                _taken(x, _places(i, x, spec, regions), _cut(spec, regions))
                for x, i, spec in zip(xs, indices, specs)
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
      values: float32, leaf after leaf, `[N]` for all regions or `[R, N]`.
      adopts: bool, which regions, `[R]`, or which entries of which regions, `[R, N]`.
    """
    sizes = [i.shape[0] for i in indices]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]

    def put(xs, indices, values, adopts):
        new = []
        for x, i, spec, start in zip(xs, indices, specs, starts):
            part = jax.lax.slice_in_dim(values, start, start + i.shape[0], axis=-1)
            who = adopts if adopts.ndim == 1 else adopts[:, start : start + i.shape[0]]
            new.append(_written(x, _places(i, x, spec, regions), part, who))
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


def _places(
    index: jax.Array, x: jax.Array, spec: P, regions: Regions
) -> tuple[jax.Array, list[jax.Array]]:
    """(whether this device holds an entry, its coordinates in the device's part of the leaf).

    Coordinates of entries that it does not hold lie outside of its part.
    """
    local = x.shape[1:]
    cut = _cut((*spec, *(None,) * (len(local) - len(spec))), regions)
    whole = [n * math.prod(regions.mesh.shape[a] for a in names) for n, names in zip(local, cut)]
    coordinates = []
    for n in reversed(whole[1:]):
        coordinates.insert(0, index % n)
        index = index // n
    coordinates.insert(0, index)  # of a scalar, too: it has one entry, at 0
    here = []
    for k, names in enumerate(cut):
        if names:
            coordinates[k] -= jax.lax.axis_index(names) * local[k]
    for coordinate, n in zip(coordinates, local or (1,)):
        here.append((coordinate >= 0) & (coordinate < n))
    holds = jnp.stack(here).all(axis=0)
    coordinates[0] = jnp.where(holds, coordinates[0], (local or (1,))[0])
    return holds, coordinates


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
