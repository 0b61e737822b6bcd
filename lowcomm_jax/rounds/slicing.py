"""`Slicing`: one fragment's payloads between jobs, reduced in slices: cut, averaged, joined.

The averages are computed on the host's processor, beside the training.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from lowcomm_jax.compression import Codec
from lowcomm_jax.exchange import InSlices, MeshExchange
from lowcomm_jax.mesh.regions import weighted_sum
from lowcomm_jax.state.leaves import named_leaves
from lowcomm_jax.store.wire import (
    Arrays,
    Shapes,
    one_slice,
    shapes_of,
    side_by_side,
    without_region,
)

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
    return regions > 2 if exchange.codec is None else exchange.parts is not None


def padded_nbytes(exchange: MeshExchange, like: PyTree, regions: int) -> int:
    """Bytes of one region's payload in equal slices."""
    if exchange.codec is not None:
        return exchange.nbytes(like)
    return 4 * regions * -(-exchange.nbytes(like) // (4 * regions))


@dataclasses.dataclass(frozen=True)
class Slicing:
    """How payloads of one fragment are cut into slices and averaged.

    It is called on the threads of an exchange.

    Dense payloads are cut flat, padded with zeros, and summed by weight; the landing divides.
    Encoded ones are cut by their codec, averaged, and encoded again.

    Attributes:
      codec: placed on one device (`MeshExchange.whole`), or None for dense fp32.
      fragment: shapes of the fragment's leaves.
      payload: shapes and dtypes `[1, ...]` of its payload, a tree.
      rest: shapes and dtypes of the arrays beside it, by name, as they travel; with "weight" `[]`.
      parts: number of slices, one for each region of the run.
    """

    codec: Codec | None
    fragment: PyTree
    payload: PyTree
    rest: Shapes
    parts: int

    @property
    def whole(self) -> Shapes:
        """dtypes and shapes of all of one region's arrays, not cut, as they travel."""
        return self.rest | without_region(named(self.payload))

    @functools.cached_property
    def like(self) -> Shapes:
        """dtypes and shapes of one slice, cut or reduced."""
        if self.codec is None:
            return {_FLAT: ("float32", (self._each,))}
        shapes = shapes_of(named(jax.eval_shape(self._dealt, self._one)))
        return {name: (dtype, shape[1:]) for name, (dtype, shape) in shapes.items()}

    @property
    def _one(self) -> PyTree:
        """Shapes of a coded payload, without the region."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.payload)

    def _dealt(self, payload: PyTree) -> PyTree:
        return self.codec.deal(payload, self.fragment)

    @property
    def _each(self) -> int:
        """Values of a dense slice."""
        return -(-sum(self._sizes) // self.parts)

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(x.shape) for x in jax.tree.leaves(self.payload)]

    def split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """One region's arrays as (arrays for every region, slices `[parts, ...]`)."""
        rest = {name: arrays[name] for name in self.rest}
        # In the order of the leaves: arrays that have travelled come in another one.
        mine = {name: arrays[name] for name in named(self.payload)}
        if self.codec is not None:
            payload = jax.tree.structure(self.payload).unflatten(mine.values())
            return rest, _on_host(self._deal, payload)
        missing = self.parts * self._each - sum(self._sizes)
        flat = [*(x.reshape(-1) for x in mine.values()), np.zeros(missing, np.float32)]
        return rest, {_FLAT: np.concatenate(flat).reshape(self.parts, self._each)}

    def average(
        self, slices: Mapping[int, Arrays], rest: Mapping[int, Arrays], number: int
    ) -> Arrays:
        """Average or sum, `like`, of the slices of one number.

        On the host's processor, where it need not wait for inner steps.

        Args:
          slices: by region, of those that take part; the others count as zeros, of weight 0.
          rest: by region, the first result of `split`, of these regions or more.
        """
        weight_R = np.zeros(self.parts, np.float32)
        for region in slices:
            weight_R[region] = rest[region]["weight"]
        slice_R = side_by_side(slices, self.parts, self.like)
        return _on_host(self._program, slice_R, weight_R, np.int32(number))

    def average_all(self, slices: Mapping[int, Arrays], rest: Mapping[int, Arrays]) -> Arrays:
        """`average` of all slices, `[parts, ...]`; `slices`: by region, `[parts, ...]`."""
        averages = [
            self.average({r: one_slice(x, s) for r, x in slices.items()}, rest, s)
            for s in range(self.parts)
        ]
        return {name: np.stack([one[name] for one in averages]) for name in self.like}

    @functools.cached_property
    def _program(self) -> Callable:
        return jax.jit(self._dense if self.codec is None else self._coded)

    @functools.cached_property
    def _deal(self) -> Callable:
        return jax.jit(lambda payload: named(self._dealt(payload)))

    @functools.cached_property
    def _undeal(self) -> Callable:
        return jax.jit(lambda slices: named(self.codec.undeal(slices, self.fragment)))

    def _dense(self, slice_R, weight_R, number):
        del number
        return {name: weighted_sum(x, weight_R) for name, x in slice_R.items()}

    def _coded(self, slice_R, weight_R, number):
        slice_R = jax.tree.structure(self.payload).unflatten(slice_R[name] for name in self.like)
        return named(self.codec.recode(slice_R, weight_R, number, self.fragment))

    def join(self, slices: Arrays) -> InSlices:
        """All reduced slices, `[parts, ...]` by name, as the landing takes them."""
        leaves, treedef = jax.tree.flatten(self.payload)
        if self.codec is not None:
            coded = treedef.unflatten(slices[name] for name in self.like)
            joined = _on_host(self._undeal, coded)
            return InSlices(treedef.unflatten(joined[name] for name in self.like))
        flat = slices[_FLAT].reshape(-1)[: sum(self._sizes)]
        parts = np.split(flat, np.cumsum(self._sizes)[:-1])
        return InSlices(treedef.unflatten(x.reshape(y.shape[1:]) for x, y in zip(parts, leaves)))


def named(payload: PyTree) -> dict[str, Any]:
    """The leaves of a payload by the names under which they travel."""
    return named_leaves(PAYLOAD, payload)


def _on_host(program: Callable, *args: Any) -> Arrays:
    """The arrays that a program makes on the last of the host's processors.

    A region of few devices trains on the first ones.
    """
    device = jax.local_devices(backend="cpu")[-1]
    return {name: np.asarray(x) for name, x in program(*jax.device_put(args, device)).items()}
