"""Moves arrays between the host and a mesh whose devices belong to several processes.

`place` puts host values on the mesh that all processes have; `place_parts` those of which each
process has its part. `replicated` and `whole` make arrays readable of which every process holds a
part; `fetch` copies them to the host. All processes of the mesh call these together. `fetch_boxes`
copies the parts that this process holds.

On the host typed PRNG keys (`jax.random.key`) are their uint32 words (`host_form`); `place_like`
makes them keys again.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

PyTree = Any


def place(tree: PyTree, shardings: Sharding | PyTree) -> PyTree:
    """`jax.device_put` of host values that are the same in all processes.

    Every process takes its devices' part of them; nothing is compared between processes.

    Args:
      shardings: one for all leaves, or a tree of them.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(_place, tree, shardings)


def _place(x: Any, sharding: Sharding) -> jax.Array:
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place_like(host: PyTree, like: PyTree) -> PyTree:
    """`place` of what `fetch` gave, where the leaves of `like` lie; words become keys again.

    Args:
      like: arrays or `jax.ShapeDtypeStruct` with a sharding, a tree of the structure of `host`.
    """
    placed = place(host, jax.tree.map(lambda x: x.sharding, like))
    return jax.tree.map(lambda x, y: _as_keys(y)(x) if is_key(y) else x, placed, like)


def is_key(x: Any) -> bool:
    """Whether an array, or the shape of one, holds typed PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def host_form(x: Any) -> Any:
    """An array, or the shape of one, as it is on the host: of keys `[...]` the words `[..., n]`."""
    if not is_key(x):
        return x
    is_array = isinstance(x, jax.Array)
    return jax.random.key_data(x) if is_array else jax.eval_shape(jax.random.key_data, x)


def key_kinds(named: dict[str, Any]) -> dict[str, str]:
    """Name -> implementation, as `threefry2x32`, of the typed keys among arrays or shapes."""
    return {name: _kind(x) for name, x in named.items() if is_key(x)}


def _kind(x: Any) -> str:
    return str(jax.random.key_impl(jnp.empty((), x.dtype)))


def _as_keys(like: Any):
    return _wrap(_kind(like), like.sharding)


@functools.cache
def _wrap(kind: str, sharding: Sharding):
    return jax.jit(lambda x: jax.random.wrap_key_data(x, impl=kind), out_shardings=sharding)


class Part(NamedTuple):
    """Which part of an array this process's devices hold, the smallest box around it.

    Attributes:
      first: where the part begins, along every leading axis, in pieces.
      length: its pieces along every leading axis.
      of: number of equal pieces that each axis is cut into.
    """

    first: tuple[int, ...]
    length: tuple[int, ...]
    of: tuple[int, ...]

    def range(self, axis: int, size: int) -> range:
        """The indices of an axis of `size` that this process holds."""
        each = size // self.of[axis]
        return range(self.first[axis] * each, (self.first[axis] + self.length[axis]) * each)


def part_here(sharding: NamedSharding, pieces: tuple[int, ...]) -> Part:
    """This process's part of an array whose leading axes are cut into `pieces` each."""
    held = sharding.addressable_devices_indices_map(pieces).values()
    spans = [[s.indices(n) for s, n in zip(index, pieces)] for index in held]
    first = [min(one[a][0] for one in spans) for a in range(len(pieces))]
    last = [max(one[a][1] for one in spans) for a in range(len(pieces))]
    return Part(tuple(first), tuple(b - a for a, b in zip(first, last)), pieces)


def place_parts(tree: PyTree, sharding: NamedSharding, part: Part) -> PyTree:
    """Put host values on the mesh of which every process holds its own part only.

    Args:
      tree: leaves `[...]`, this process's `part` of the whole.
    """

    def one(x: Any) -> jax.Array:
        host = np.asarray(x)
        cut = len(part.of)
        each = [n // k for n, k in zip(host.shape, part.length)]
        shape = (*(n * k for n, k in zip(each, part.of)), *host.shape[cut:])
        offset = [n * k for n, k in zip(each, part.first)]

        def block(index):
            spans = [s.indices(n) for s, n in zip(index, shape)]
            own = [slice(a - o, b - o) for (a, b, _), o in zip(spans, offset)]
            return host[(*own, *index[cut:])]

        return jax.make_array_from_callback(shape, sharding, block)

    return jax.tree.map(one, tree)


def whole(x: Any) -> Any:
    """An array of which every process holds a part, whole, on a device of this process.

    All processes of the mesh call it together. Anything else stays as it is.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if _is_hidden(x):
        x = _replicate(x.sharding.mesh)(x)
    return x.addressable_data(0)


def replicated(tree: PyTree) -> PyTree:
    """The tree with arrays that `np.asarray` accepts in every process; does not wait for them.

    Arrays of which this process holds only a part are replicated over their mesh, all in one
    program. All processes of the mesh call it together. Meant for metrics, which are small.
    """
    leaves, treedef = jax.tree.flatten(tree)
    hidden = [i for i, x in enumerate(leaves) if _is_hidden(x)]
    if hidden:
        shown = _replicate(leaves[hidden[0]].sharding.mesh)([leaves[i] for i in hidden])
        for i, x in zip(hidden, shown):
            leaves[i] = x
    return treedef.unflatten(leaves)


def to_host_if_hidden(tree: PyTree) -> PyTree:
    """The tree with arrays of which this process holds only a part copied to the host, whole.

    A device holds one of them whole at a time. All processes of the mesh call it together.
    """
    return jax.tree.map(lambda x: np.asarray(whole(x)) if _is_hidden(x) else x, tree)


def _is_hidden(x: Any) -> bool:
    """Whether `np.asarray` would refuse an array, since other processes hold a part of it."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return False
    return not (x.is_fully_addressable or x.is_fully_replicated)


@functools.cache
def _replicate(mesh: Mesh):
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def fetch(named: dict[str, Any], here: bool = True) -> dict[str, np.ndarray]:
    """Copy arrays to the host: the devices' own may be donated right afterwards.

    Args:
      here: False = only take part in the other processes' fetch, and return an empty dict.
    """
    for leaf in named.values():
        if isinstance(leaf, jax.Array) and not is_key(leaf) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    host = {}
    for name, leaf in named.items():
        leaf = host_form(leaf)
        # One after the other, so that devices need not hold all of them whole at once. Who only
        # takes part waits as well: else it runs ahead, until its threads are all in collectives
        # that the others have not begun.
        found = jax.block_until_ready(whole(leaf))
        if here:
            # np.array copies; np.asarray may hand out a view of a CPU device's own buffer.
            host[name] = np.array(found)
    return host


class Box(NamedTuple):
    """A part of an array.

    Attributes:
      first: its first index along every axis of the array.
      values: its elements, on the host.
    """

    first: tuple[int, ...]
    values: np.ndarray


def fetch_boxes(named: dict[str, Any], leads: bool) -> dict[str, list[Box]]:
    """Copy the parts of arrays to the host that this process holds; waits for no other process.

    Every element is in one box of one process: replicas are left out.

    Args:
      leads: whether this process copies the arrays that every process holds whole.
    """
    mine = {name: _boxes(host_form(leaf), leads) for name, leaf in named.items()}
    for found in mine.values():
        for _, values in found:
            if isinstance(values, jax.Array):
                values.copy_to_host_async()
    return {
        name: [Box(first, np.array(values)) for first, values in found]
        for name, found in mine.items()
    }


def _boxes(x: Any, leads: bool) -> list[tuple[tuple[int, ...], Any]]:
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return [((0,) * np.ndim(x), x)] if leads else []
    return [
        (tuple(s.indices(n)[0] for s, n in zip(shard.index, x.shape)), shard.data)
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]
