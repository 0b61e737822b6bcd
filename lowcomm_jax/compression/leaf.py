"""A codec of one leaf, told how the leaf is placed: what `compression.PerTensor` calls.

`in_units` makes one of a `UnitCodec`. Codecs that need more than units of a grid implement
`LeafCodec` themselves: products of matrices (`low_rank`), choices that change by the round
(`random_k`).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.grid import Shape, Unit
from lowcomm_jax.compression.means import as_rounded, fold_regions, weighted_mean
from lowcomm_jax.compression.placement import Placement, UnitShares
from lowcomm_jax.compression.units import Matrix, Payload, UnitCodec

PyTree = Any


class LeafCodec(abc.ABC):
    """Codes a device's part of a leaf, matrices `[l, n, m]`; subclasses are frozen dataclasses.

    Attributes:
      requantizable: see `UnitCodec`; only codecs of units are.
      reads_params: see `UnitCodec`.
      layers_apart: whether all arrays of payload and state are `[L, ...]`, so that matrices may be
        coded one after the other.
    """

    requantizable: bool = False
    reads_params: bool = False
    layers_apart: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Short label for tables."""

    @abc.abstractmethod
    def unit_of(self, matrices: Shape) -> Unit:
        """The unit that a device holds whole, for a stack of this shape (L, N, M)."""

    def in_shares(self, matrices: Shape) -> bool:
        """Whether a stack of this shape may be coded in shares (`Placement.shares`).

        The codec then makes the payload whole on every device.
        """
        del matrices
        return False

    def init(self, place: Placement, seed: int) -> PyTree:
        """State of the whole leaf at step 0; `seed` differs by leaf, and not by region."""
        del place, seed
        return ()

    @abc.abstractmethod
    def encode(
        self, x: jax.Array, state: PyTree, place: Placement, params: jax.Array | None = None
    ) -> tuple[PyTree, PyTree]:
        """(payload, new state) of a device's part, `[l, n, m]`; params: weights of this shape."""

    @abc.abstractmethod
    def decode(self, payload: PyTree, place: Placement) -> jax.Array:
        """fp32 `[l, n, m]`."""

    def mean(self, payload_R: PyTree, weight_R: jax.Array, place: Placement) -> jax.Array:
        """Weighted mean over regions, fp32 `[l, n, m]`; see `Codec.aggregate`."""
        return weighted_mean(lambda payload: self.decode(payload, place), payload_R, weight_R)

    def payload_like(self, place: Placement) -> PyTree:
        """Shapes of the payload of the whole leaf: what one device that codes it all makes."""
        return _payload_of(self, place.alone)

    def dealt_nbytes(self, place: Placement) -> int:
        """Bytes of all slices of the payload of the whole leaf."""
        arrays = jax.tree.leaves(self.payload_like(place))
        return sum(place.dealt_size(x.shape) * x.dtype.itemsize for x in arrays)

    @abc.abstractmethod
    def payload_specs(self, place: Placement) -> PyTree:
        """How devices hold the arrays of `payload_like`."""

    def state_specs(self, place: Placement) -> PyTree:
        """How devices hold the state of `init`."""
        del place
        return ()

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, place: Placement, energy: float
    ) -> jax.Array | None:
        """Measured rank of the mean, averaged over the device's matrices; see `Codec.mean_rank`."""
        del payload_R, weight_R, place, energy
        return None

    def sends_all(self, place: Placement) -> bool:
        """Whether a codec that is meant to choose would send every value of the leaf."""
        del place
        return False


@dataclasses.dataclass(frozen=True)
class InUnits(LeafCodec):
    """See `in_units`."""

    codec: UnitCodec

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def requantizable(self) -> bool:
        # A mean is encoded again where no weights are at hand.
        return self.codec.requantizable and not self.codec.reads_params

    @property
    def reads_params(self) -> bool:
        return self.codec.reads_params

    @property
    def averages_senders(self) -> bool:
        """Whether means are over those who sent a value: whether `summands` gives weights."""
        place = Placement((64, 64), False, self.codec.unit)  # whatever its shape
        summands = functools.partial(self.codec.summands, unit=place.sides)
        return jax.eval_shape(summands, self.payload_like(place))[1] is not None

    def unit_of(self, matrices: Shape) -> Unit:
        return self.codec.unit

    def in_shares(self, matrices: Shape) -> bool:
        return True

    def encode(
        self, x: jax.Array, state: PyTree, place: Placement, params: jax.Array | None = None
    ) -> tuple[PyTree, PyTree]:
        params = None if params is None else place.to_units(params)
        units, matrix = place.to_units(x), place.matrix()
        return self.code_whole(units, matrix, place, self, params), state

    def code_whole(
        self,
        units: jax.Array,
        matrix: Matrix,
        place: Placement,
        owner: LeafCodec,
        params: jax.Array | None = None,
    ) -> Payload:
        """`code`; of a leaf in shares the arrays with an entry for each unit are gathered.

        Args:
          owner: whose `payload_like` says which they are.
        """
        shares = place.shares
        if shares is None:
            return self.code(units, matrix, params)
        like = owner.payload_like(place)
        of_units = {k for k, x in like.items() if x.shape[shares.side :][:1] == (shares.count,)}
        payload = self.code(units, matrix, params, of_units)
        return {k: shares.gather(v) if k in of_units else v for k, v in payload.items()}

    def code(
        self,
        units: jax.Array,
        matrix: Matrix,
        params: jax.Array | None = None,
        of_units: set[str] | None = None,
    ) -> Payload:
        """The payload of units; one with a value that is not finite carries NaN in every float.

        Args:
          of_units: names of the arrays that may have an entry for each unit; None = any of that
            shape.
        """
        bad = ~jnp.all(jnp.abs(units) < jnp.inf, axis=(3, 4))
        # The select also makes every use of a unit see the same bits (`as_rounded`).
        units = jnp.where(bad[..., None, None], jnp.nan, units)
        payload = self.codec.encode(units, matrix, params)

        def mark(name, x):
            by_unit = x.shape[1:3] == bad.shape[1:] and (of_units is None or name in of_units)
            if not (jnp.issubdtype(x.dtype, jnp.floating) and by_unit):
                return x
            return jnp.where(bad.reshape(*bad.shape, *(1,) * (x.ndim - 3)), jnp.nan, x)

        return {name: mark(name, x) for name, x in payload.items()}

    def decode(self, payload: PyTree, place: Placement) -> jax.Array:
        own = taken(payload, place.shares)
        return place.from_units(self.codec.decode(own, place.sides))

    def mean(self, payload_R: PyTree, weight_R: jax.Array, place: Placement) -> jax.Array:
        own_R = taken(payload_R, place.shares, lead=1)
        return place.from_units(self.mean_units(own_R, weight_R, place))

    def mean_units(self, payload_R: PyTree, weight_R: jax.Array, place: Placement) -> jax.Array:
        """Weighted mean of the decoded units, in region order."""

        def summands(payload):
            return self.codec.summands(payload, place.sides)

        if jax.eval_shape(summands, jax.tree.map(lambda x: x[0], payload_R))[1] is None:
            mean = weighted_mean(lambda payload: summands(payload)[0], payload_R, weight_R)
            return self.codec.finish(mean)

        def summand(r):
            values, sent = summands(jax.tree.map(lambda x: x[r], payload_R))
            weight = weight_R[r]
            present = weight > 0
            return jnp.where(present, values * weight, 0.0), jnp.where(present, sent * weight, 0.0)

        total, weight = fold_regions(summand, weight_R.shape[0])
        mean = jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)
        return self.codec.finish(mean)

    def recode(
        self, slice_R: PyTree, weight_R: jax.Array, number: jax.Array, place: Placement
    ) -> Payload:
        """The coded weighted mean of slice `number` of everyone's payload; leaves `[R, ...]`."""
        mean = as_rounded(self.mean_units(slice_R, weight_R, place))
        return self.code(mean, place.slice_matrix(number))

    def payload_specs(self, place: Placement) -> PyTree:
        like = self.payload_like(place)
        return {name: place.array_spec(x.shape) for name, x in like.items()}

    def sends_all(self, place: Placement) -> bool:
        return self.codec.sends_all(place.sides)


def taken(payload: Payload, shares: UnitShares | None, lead: int = 0) -> Payload:
    """A device's share of a payload that is whole; `lead` more axes are in front of its arrays.

    Of slices that are joined, an array of a matrix has an entry for each unit, too.
    """
    if shares is None:
        return payload

    def own(x):
        by_unit = x.shape[shares.side + lead] == shares.count
        return shares.take(x, lead=lead) if by_unit else x

    return {name: own(x) for name, x in payload.items()}


def in_units(codec: UnitCodec | LeafCodec) -> LeafCodec:
    """The codec of leaves that codes their units with `codec`; a `LeafCodec` as it is."""
    return codec if isinstance(codec, LeafCodec) else InUnits(codec)


@functools.lru_cache(maxsize=4096)
def _payload_of(codec: LeafCodec, place: Placement) -> PyTree:
    layers, *rest = place.shape if place.stacked and codec.layers_apart else (1,)
    if layers > 1:  # alike, so that stacks of any number of them trace one
        one = _payload_of(codec, dataclasses.replace(place, shape=(1, *rest)))
        if all(x.shape[:1] == (1,) for x in jax.tree.leaves(one)):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((layers, *x.shape[1:]), x.dtype), one
            )
    whole = dataclasses.replace(place, slices=1)
    if place.slices > 1 and place.grid == whole.grid:  # slices of the units that it has anyhow
        return _payload_of(codec, whole)
    like = jax.ShapeDtypeStruct(place.shape, jnp.float32)

    def encode(x, w):
        return codec.encode(place.split(x), codec.init(place, 0), place, place.split(w))[0]

    return jax.eval_shape(encode, like, like)


def bytes_of(like: PyTree) -> int:
    """Bytes of arrays of these shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(like))
