"""The codec of one leaf: every leaf is seen as a stack of L matrices N x M.

Scalars are 1 x 1, vectors 1 x M. A tensor of more axes is split where N + M is smallest, so that
`[heads, width, model]` becomes `[heads * width, model]`. Leaves that stack layers keep the layer
axis as L.
"""

from __future__ import annotations

import abc
import math
from typing import Any

import jax

from lowcomm_jax.compression.base import encode_with_residual, weighted_mean
from lowcomm_jax.compression.row_sharding import InWindows
from lowcomm_jax.compression.windows import UnitSplit

PyTree = Any
Leaf = jax.Array | InWindows  # fp32 `[L, N, M]`
Shape = tuple[int, int, int]


class MatrixCodec(abc.ABC):
    """Encodes one leaf, fp32 `[L, N, M]`; subclasses are frozen dataclasses.

    A codec states how far a decoded value may be off, and keeps to that on both ways of payloads.
    Values come to it as they are rounded (`base.as_rounded`).

    Attributes:
      requantizable: whether a mean of decoded values may be encoded again without a state, so that
        a two-shot reduction makes sense.
      layers_apart: whether each of the L matrices is coded by itself, so that one after the other
        gives the same (`by_layer`). All arrays of payload and state are then `[L, ...]`.
      takes_windows: whether `encode` also takes a `row_sharding.InWindows`, whose units are dealt
        to the devices of a region (`unit`). Else a leaf that devices cannot hold in whole rows is
        gathered on each of them.
    """

    requantizable: bool = False
    layers_apart: bool = False
    takes_windows: bool = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Short label for tables."""

    def init(self, shape: Shape, seed: int) -> PyTree:
        """State at step 0; `seed` is the same in every region and different per leaf."""
        del shape, seed
        return ()

    @abc.abstractmethod
    def encode(self, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """(payload, new state) of an fp32 stack of matrices.

        Of a codec that `takes_windows`, x_LxNxM is a `row_sharding.InWindows` where devices hold
        no whole rows, but can hold whole units (`splits_over`).
        """

    def encode_with_residual(
        self,
        x_LxNxM: jax.Array,
        state: PyTree,
        residual_LxNxM: jax.Array,
        decay: float,
        accepted: jax.Array | None,
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """(payload, state, residual) after an encoding with error feedback; see `Codec`."""

        def decode(payload):
            return self.decode(payload, x_LxNxM.shape)

        given = (x_LxNxM, state, residual_LxNxM, decay, accepted)
        return encode_with_residual(self.encode, decode, *given)

    @abc.abstractmethod
    def decode(self, payload: PyTree, shape: Shape) -> Leaf:
        """fp32 `[L, N, M]`."""

    @abc.abstractmethod
    def nbytes(self, shape: Shape) -> int:
        """Bytes of the payload of a stack of this shape."""

    def rows_together(self, shape: Shape) -> int:
        """Number of the N rows that are encoded together.

        A device of a region that holds a multiple of it encodes its own rows; statistics of the
        whole are summed over the devices. 0 = rows are independent, and columns may be cut as well.
        """
        del shape
        return 1

    def unit(self, shape: Shape) -> int:
        """How many neighbouring values of `[N M]` are coded together.

        A device that cannot hold whole rows should hold a multiple of them (`takes_windows`).
        """
        return shape[2]

    def splits_over(self, shape: Shape, devices: int) -> bool:
        """Whether the codec takes windows, and devices can split the leaf into whole units."""
        return (
            self.takes_windows
            and UnitSplit(math.prod(shape[1:]), self.unit(shape), devices).works()
        )

    def sends_all(self, shape: Shape) -> bool:
        """Whether a codec that is meant to choose would send every value of this shape."""
        del shape
        return False

    def aggregate(self, payload_R: PyTree, weight_R: jax.Array, shape: Shape) -> Leaf:
        """Weighted mean over regions, fp32 `[L, N, M]`; see `Codec.aggregate`."""
        return weighted_mean(lambda payload: self.decode(payload, shape), payload_R, weight_R)

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, shape: Shape, energy: float
    ) -> jax.Array | None:
        """Measured rank of the mean, averaged over L; None unless it travels as factors."""
        del payload_R, weight_R, shape, energy
        return None


def matrix_shape(shape: tuple[int, ...], stacked: bool) -> Shape:
    """(L, N, M) of a leaf; `stacked` leaves carry L as their first axis.

    >>> matrix_shape((), False), matrix_shape((7,), False), matrix_shape((4, 6, 9), False)
    ((1, 1, 1), (1, 1, 7), (1, 24, 9))
    >>> matrix_shape((12, 5, 7), True), matrix_shape((12,), True)
    ((12, 5, 7), (12, 1, 1))
    """
    at, lead = first_column(shape, stacked), int(stacked)
    return math.prod(shape[:lead]), math.prod(shape[lead:at]), math.prod(shape[at:])


def first_column(shape: tuple[int, ...], stacked: bool) -> int:
    """Axis of a leaf with which the columns of its matrices begin.

    >>> first_column((4, 6, 9), False), first_column((12, 5, 7), True), first_column((7,), False)
    (2, 2, 0)
    """
    lead = int(stacked)
    if len(shape) - lead < 2:
        return lead
    cuts = range(lead + 1, len(shape))
    return min(cuts, key=lambda i: math.prod(shape[lead:i]) + math.prod(shape[i:]))
