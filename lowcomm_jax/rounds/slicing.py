"""`Slicing`: the `Reduction` of one fragment's payloads between jobs: cut, averaged, joined.

The averages are computed on the host's processor, beside the training.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.compression.staged import Staged
from lowcomm_jax.compression.two_shot import Sliced
from lowcomm_jax.exchange import InSlices, MeshExchange
from lowcomm_jax.mesh.regions import weighted_sum
from lowcomm_jax.state.leaves import named_leaves
from lowcomm_jax.store.wire import Arrays, Shapes, shapes_of

PyTree = Any
PAYLOAD = "payload"
_FLAT = "flat"


def goes_in_slices(exchange: MeshExchange, regions: int) -> bool:
    """Whether payloads that all regions exchange are reduced in slices.

    Coded ones as on the mesh; dense ones where that is fewer bytes than everyone's whole payloads.
    Never where a merge rule reads them one by one.
    """
    if exchange.one_by_one:
        return False
    return regions > 2 if exchange.codec is None else exchange.slices is not None


def padded_nbytes(exchange: MeshExchange, like: PyTree, regions: int) -> int:
    """Bytes of one region's payload in equal slices."""
    if exchange.codec is not None:
        return exchange.nbytes(like)
    return 4 * regions * -(-exchange.nbytes(like) // (4 * regions))


@dataclasses.dataclass(frozen=True)
class Slicing:
    """The `wire.Reduction` of one fragment's payloads.

    Dense payloads are cut flat, padded with zeros, and summed by weight; the landing divides.
    Encoded ones are cut by their codec, averaged, and encoded again.

    Attributes:
      codec: in slices, or None for dense fp32.
      fragment: shapes of the fragment's leaves.
      payload: shapes and dtypes `[1, ...]` of its payload, a tree.
      rest: shapes and dtypes of the arrays beside it, by name, as they travel; with "weight" `[]`.
      parts: number of slices.
    """

    codec: Sliced | Staged | None
    fragment: PyTree
    payload: PyTree
    rest: Shapes
    parts: int

    @functools.cached_property
    def like(self) -> Shapes:
        """See `Reduction`."""
        if self.codec is None:
            return {_FLAT: ("float32", (self._each,))}
        shapes = shapes_of(named(self.payload))
        # Behind the region and the slice.
        return {name: (dtype, shape[2:]) for name, (dtype, shape) in shapes.items()}

    @property
    def _each(self) -> int:
        """Values of a dense slice."""
        return -(-sum(self._sizes) // self.parts)

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(x.shape) for x in jax.tree.leaves(self.payload)]

    def split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """See `Reduction`."""
        rest = {name: arrays[name] for name in self.rest}
        # In the order of the leaves: arrays that have travelled come in another one.
        mine = {name: arrays[name] for name in named(self.payload)}
        if self.codec is not None:
            return rest, mine
        missing = self.parts * self._each - sum(self._sizes)
        flat = [*(x.reshape(-1) for x in mine.values()), np.zeros(missing, np.float32)]
        return rest, {_FLAT: np.concatenate(flat).reshape(self.parts, self._each)}

    def reduce(self, slice_R: Arrays, rest_R: Arrays, takes_part_R: np.ndarray) -> Arrays:
        """See `Reduction`; on the host's processor, where it need not wait for inner steps."""
        weight_R = np.where(takes_part_R, rest_R["weight"], np.float32(0))
        found = self._program(*jax.device_put((slice_R, weight_R), _beside_training()))
        return {name: np.asarray(x) for name, x in found.items()}

    @functools.cached_property
    def _program(self) -> Callable:
        return jax.jit(self._dense if self.codec is None else self._coded)

    def _dense(self, slice_R, weight_R):
        return {name: weighted_sum(x, weight_R) for name, x in slice_R.items()}

    def _coded(self, slice_R, weight_R):
        slice_R = jax.tree.structure(self.payload).unflatten(slice_R[name] for name in self.like)
        if not isinstance(self.codec, Staged):
            return named(self.codec.reduce_slice(slice_R, weight_R, self.fragment))
        part = self.codec.part(self.fragment)
        stages = [
            self.codec.codec.reduce_slice(_stage(slice_R, s), weight_R, part)
            for s in range(self.codec.stages)
        ]
        return named(jax.tree.map(lambda *xs: jnp.stack(xs), *stages))

    def join(self, slices: Arrays) -> InSlices:
        """All reduced slices as the landing takes them, `[parts, ...]` by name."""
        leaves, treedef = jax.tree.flatten(self.payload)
        if self.codec is not None:
            return InSlices(treedef.unflatten(slices[name] for name in self.like))
        flat = slices[_FLAT].reshape(-1)[: sum(self._sizes)]
        parts = np.split(flat, np.cumsum(self._sizes)[:-1])
        return InSlices(treedef.unflatten(x.reshape(y.shape[1:]) for x, y in zip(parts, leaves)))


def named(payload: PyTree) -> dict[str, Any]:
    """The leaves of a payload by the names under which they travel."""
    return named_leaves(PAYLOAD, payload)


def _stage(slice_R: PyTree, stage: int) -> PyTree:
    return jax.tree.map(lambda x: x[:, stage], slice_R)


def _beside_training() -> jax.Device:
    """The last of the host's processors: a region of few trains on the first ones."""
    return jax.local_devices(backend="cpu")[-1]
