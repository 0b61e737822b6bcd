"""Moves arrays between the host and a mesh whose devices belong to several processes.

`place` puts host values on the mesh, `fetch` copies arrays to the host, `whole` gives an array of
which every process holds a part. All processes of the mesh call them together.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
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


def whole(x: Any) -> Any:
    """An array of which every process holds a part, whole, on a device of this process.

    All processes of the mesh call it together. Anything else stays as it is.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if not x.is_fully_replicated:
        x = _replicate(x.sharding.mesh)(x)
    return x.addressable_data(0)


@functools.cache
def _replicate(mesh: Mesh):
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def fetch(named: dict[str, Any], here: bool = True) -> dict[str, np.ndarray]:
    """Copy arrays to the host: the devices' own may be donated right afterwards.

    Args:
      here: False = only take part in what the other processes fetch; returns nothing.
    """
    for leaf in named.values():
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    host = {}
    for name, leaf in named.items():
        # One after the other, so that devices need not hold all of them whole at once.
        found = whole(leaf)
        if here:
            # np.array copies; np.asarray may hand out a view of a CPU device's own buffer.
            host[name] = np.array(found)
    return host
