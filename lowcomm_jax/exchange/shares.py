"""Moves payloads between regions as flat buffers, of which each device moves its own share.

In: trees of leaves `[R, ...]` and their layouts inside a region. Out: every region's payload
everywhere (`gather`), one slice of every region's (`exchange_slices`), or whatever a collective on
the buffers makes of them (`run_on_shares`).

Devices of a region that hold the same values cut them into shares. So what crosses between regions
is one payload a region, however many devices the region has. Padding comes on top: for each dtype
and layout in the payload, fewer values than a region has devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lowcomm_jax.mesh.regions import REGION, Regions, join_shares, take_share

PyTree = Any


def run_on_shares(
    regions: Regions,
    tree_R: PyTree,
    specs: PyTree,
    move: Callable[..., Sequence[list[jax.Array]]],
    *args: Any,
    lead: int = 1,
    results: int = 1,
    out: str | None = REGION,
) -> list[PyTree]:
    """Run the collective `move` on the buffers of a tree, under `shard_map` over all axes.

    Args:
      tree_R: leaves `[R, ...]`.
      specs: `PartitionSpec` of each leaf behind the region axis.
      move: `(buffers, *args) -> results`, each a list of buffers like the ones it got; a buffer is
        `[L, M]` (L regions of a slot), or has the first `lead` axes of the leaves in front of M.
      args: arrays, the same on all devices.
      results: how many results `move` has.
      out: mesh axis of the results' leading axis; None = the same in every region.

    Returns:
      trees of `results`; leaves keep what stands behind their first `lead` axes.
    """
    leaves, treedef = jax.tree.flatten(tree_R)
    inner = treedef.flatten_up_to(specs)
    idle = [regions.idle_axes(spec) for spec in inner]

    def slot(leaves_L, *args):
        found = move(_pack(leaves_L, idle, lead), *args)
        return [_unpack(buffers, leaves_L, idle, lead) for buffers in found]

    moved = jax.shard_map(
        slot,
        mesh=regions.mesh,
        in_specs=([P(REGION, *spec) for spec in inner], *(P() for _ in args)),
        out_specs=[[P(out, *spec) for spec in inner]] * results,
        check_vma=False,
    )(leaves, *args)
    return [treedef.unflatten(one) for one in moved]


def gather(regions: Regions, tree_R: PyTree, specs: PyTree) -> PyTree:
    """Hand every region all payloads: leaves `[R, ...]`, replicated over the region axis."""
    if regions.slots == 1:
        return tree_R

    def everyone(buffers):
        return [[jax.lax.all_gather(x, REGION, axis=0, tiled=True) for x in buffers]]

    return run_on_shares(regions, tree_R, specs, everyone, out=None)[0]


def exchange_slices(regions: Regions, tree_R: PyTree, specs: PyTree) -> PyTree:
    """Hand region s slice s of every region: leaves `[R regions, R slices, ...]` swap axes.

    Args:
      specs: of what stands behind both axes.

    Returns:
      leaves `[R slices, R regions, ...]`, sharded over the region axis.
    """
    if regions.slots == 1:
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree_R)

    def swap(x):
        # Slot by slot; concatenation over slots is region order.
        swapped = jax.lax.all_to_all(x, REGION, split_axis=1, concat_axis=0, tiled=True)
        return jnp.swapaxes(swapped, 0, 1)

    treedef = jax.tree.structure(tree_R)
    behind = treedef.unflatten([P(None, *spec) for spec in treedef.flatten_up_to(specs)])
    return run_on_shares(regions, tree_R, behind, lambda xs: [[swap(x) for x in xs]], lead=2)[0]


def _kinds(leaves: Sequence[jax.Array], idle: Sequence[tuple[str, ...]]) -> list[tuple]:
    """What decides which leaves share a buffer: dtype, and along which axes they are equal."""
    return [(x.dtype, axes) for x, axes in zip(leaves, idle)]


def _pack(leaves, idle, lead: int) -> list[jax.Array]:
    """This device's share of all leaves of a kind side by side, for each kind in turn."""
    kinds, buffers = _kinds(leaves, idle), []
    for kind in dict.fromkeys(kinds):
        own = [x for x, one in zip(leaves, kinds) if one == kind]
        whole = jnp.concatenate([x.reshape(*x.shape[:lead], -1) for x in own], axis=lead)
        buffers.append(take_share(whole, kind[1]))
    return buffers


def _unpack(buffers, like, idle, lead: int) -> list[jax.Array]:
    """Inverse of `_pack`, for buffers whose first `lead` axes may have other lengths."""
    kinds, parts = _kinds(like, idle), {}
    for buffer, kind in zip(buffers, dict.fromkeys(kinds)):
        shapes = [x.shape[lead:] for x, one in zip(like, kinds) if one == kind]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        whole = join_shares(buffer, kind[1], int(ends[-1]))
        split = zip(jnp.split(whole, ends[:-1], axis=lead), shapes)
        parts[kind] = iter([part.reshape(*part.shape[:lead], *shape) for part, shape in split])
    return [next(parts[kind]) for kind in kinds]
