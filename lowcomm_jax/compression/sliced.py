"""A tree as equal slices, each encoded on its own: what a two-shot reduction exchanges."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.base import Codec, Wrapper
from lowcomm_jax.compression.matrix import matrix_shape
from lowcomm_jax.compression.rules import PerTensor
from lowcomm_jax.fragments import path_name

PyTree = Any
Shape = tuple[int, ...]


class Dealt(NamedTuple):
    """How one leaf, `[*lead, groups, held, *row]`, is dealt out: a slice has `each` of held.

    Attributes:
      lead: the layer axis, if stacked.
      groups: neighbouring rows of one device or, with 1, all of them.
      held: rows of a group; or values, where they are dealt out one by one.
      each: of them in a slice, padding included.
      row: shape of a row, () of a value.
    """

    lead: Shape
    groups: int
    held: int
    each: int
    row: Shape


@dataclasses.dataclass(frozen=True)
class Sliced(Wrapper):
    """Encode `parts` slices of every leaf; payload leaves carry a leading axis of that length.

    Matrices are dealt out row by row, short ones and vectors value by value; stacked leaves within
    each layer. Rows are dealt out, and padded by repeating the last one, within each device's share
    of them, so that a device that holds some of the rows holds its part of every slice; where that
    would pad by more than a quarter, and values, all together. Scales and codebooks are those of a
    slice.

    Attributes:
      codec: a `PerTensor` without state.
      parts: how many.
      devices: that rows may be cut over.
    """

    codec: PerTensor
    parts: int
    devices: int = 1

    @property
    def name(self) -> str:
        return self.codec.name

    def init(self, like):
        return self.codec.init(self.slice_like(like))

    def encode(self, tree, state):
        encode = jax.vmap(lambda one: self.codec.encode(one, ())[0])
        return encode(self._map(self._cut, tree)), state

    def decode(self, payload, like):
        one = self.slice_like(like)
        slices = jax.vmap(lambda coded: self.codec.decode(coded, one))(payload)
        return self._map(self._join, like, slices)

    def aggregate(self, payload_R, weight_R, like):
        return Codec.aggregate(self, payload_R, weight_R, like)

    def reduce_slice(self, slice_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        """The coded weighted mean of one slice of everyone's payload; leaves `[R, ...]`."""
        one = self.slice_like(like)
        return self.codec.encode(self.codec.aggregate(slice_R, weight_R, one), ())[0]

    def nbytes(self, like):
        return self.parts * self.codec.nbytes(self.slice_like(like))

    def rows_together(self, path, shape):
        stacked, together = self.codec.is_stacked(path), self.codec.rows_together(path, shape)
        dealt = self._dealt(shape, stacked)
        # Rows that no devices can share are dealt out alike in every part of the columns.
        whole = dealt.row and math.gcd(matrix_shape(shape, stacked)[1], self.devices) == 1
        if dealt.groups > 1 or (whole and not together):
            return together
        return self.parts * max(together, 1)

    def slice_like(self, like: PyTree) -> PyTree:
        """Shapes of one slice of every leaf."""

        def one(leaf, stacked):
            dealt = self._dealt(leaf.shape, stacked)
            shape = (*dealt.lead, dealt.groups * dealt.each, *dealt.row)
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        return self._map(one, like)

    def _map(self, fn, tree: PyTree, *rest: PyTree) -> PyTree:
        """fn(leaf, *entries of `rest`, whether layers are stacked) for every leaf."""

        def one(path, leaf, *others):
            return fn(leaf, *others, self.codec.is_stacked(path_name(path)))

        return jax.tree_util.tree_map_with_path(one, tree, *rest)

    def _dealt(self, shape: Shape, stacked: bool) -> Dealt:
        """How a leaf of this shape is dealt out."""
        lead, rest = (shape[:1], shape[1:]) if stacked else ((), shape)
        _, rows, columns = matrix_shape(shape, stacked)
        if len(rest) < 2 or rows < self.parts:
            count = math.prod(rest)
            return Dealt(lead, 1, count, -(-count // self.parts), ())
        groups = math.gcd(rows, self.devices)
        held = rows // groups
        each = -(-held // self.parts)
        if 4 * each * self.parts > 5 * held:
            groups, held, each = 1, rows, -(-rows // self.parts)
        return Dealt(lead, groups, held, each, (columns,))

    def _cut(self, x: jax.Array, stacked: bool) -> jax.Array:
        """`[(L,) rows, ...]` -> `[parts, (L,) rows / parts, ...]`: row i goes to i mod parts."""
        lead, groups, held, each, row = self._dealt(x.shape, stacked)
        x, axis = x.reshape(*lead, groups, held, *row), len(lead) + 1
        missing = each * self.parts - held
        if missing:
            width = [(0, missing if a == axis else 0) for a in range(x.ndim)]
            x = jnp.pad(x, width, mode="edge")
        x = jnp.moveaxis(x.reshape(*lead, groups, each, self.parts, *row), axis + 1, 0)
        return x.reshape(self.parts, *lead, groups * each, *row)

    def _join(self, like: Any, slices: jax.Array, stacked: bool) -> jax.Array:
        """Inverse of `_cut`, without the padding."""
        lead, groups, held, each, row = self._dealt(like.shape, stacked)
        axis = len(lead) + 1
        x = jnp.moveaxis(slices.reshape(self.parts, *lead, groups, each, *row), 0, axis + 1)
        x = x.reshape(*lead, groups, each * self.parts, *row)
        return jax.lax.slice_in_dim(x, 0, held, axis=axis).reshape(like.shape)
