"""A tree as equal slices, each encoded on its own: what a two-shot reduction exchanges."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.base import Codec, Wrapper
from lowcomm_jax.compression.rules import PerTensor
from lowcomm_jax.fragments import path_name

PyTree = Any
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Sliced(Wrapper):
    """Encode `parts` slices of every leaf; payload leaves carry a leading axis of that length.

    Matrices are dealt out row by row, short ones and vectors value by value; stacked leaves within
    each layer. So a device that holds some of the rows holds its part of every slice. The last ones
    are padded by repeating the edge, and scales and codebooks are those of a slice.

    Attributes:
      codec: a `PerTensor` without state.
      parts: how many.
    """

    codec: PerTensor
    parts: int

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
        return self.parts * self.codec.rows_together(path, shape)

    def slice_like(self, like: PyTree) -> PyTree:
        """Shapes of one slice of every leaf."""

        def one(leaf, stacked):
            lead, rest = _split(leaf.shape, stacked, self.parts)
            shape = (*lead, -(-rest[0] // self.parts), *rest[1:])
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        return self._map(one, like)

    def _map(self, fn, tree: PyTree, *rest: PyTree) -> PyTree:
        """fn(leaf, *entries of `rest`, whether layers are stacked) for every leaf."""

        def one(path, leaf, *others):
            return fn(leaf, *others, self.codec.is_stacked(path_name(path)))

        return jax.tree_util.tree_map_with_path(one, tree, *rest)

    def _cut(self, x: jax.Array, stacked: bool) -> jax.Array:
        """`[(L,) rows, ...]` -> `[parts, (L,) rows / parts, ...]`: row i goes to i mod parts."""
        lead, rest = _split(x.shape, stacked, self.parts)
        x, axis = x.reshape(*lead, *rest), len(lead)
        each = -(-rest[0] // self.parts)
        missing = each * self.parts - rest[0]
        if missing:
            width = [(0, missing if a == axis else 0) for a in range(x.ndim)]
            x = jnp.pad(x, width, mode="edge")
        x = x.reshape(*lead, each, self.parts, *rest[1:])
        return jnp.moveaxis(x, axis + 1, 0)

    def _join(self, like: Any, slices: jax.Array, stacked: bool) -> jax.Array:
        """Inverse of `_cut`, without the padding."""
        lead, rest = _split(like.shape, stacked, self.parts)
        axis = len(lead)
        x = jnp.moveaxis(slices, 0, axis + 1).reshape(*lead, -1, *rest[1:])
        return jax.lax.slice_in_dim(x, 0, rest[0], axis=axis).reshape(like.shape)


def _split(shape: Shape, stacked: bool, parts: int) -> tuple[Shape, Shape]:
    """(layer axis if stacked, the axes that are cut along the first): flat where rows are few."""
    lead, rest = (shape[:1], shape[1:]) if stacked else ((), shape)
    if len(rest) < 2 or rest[0] < parts:
        rest = (math.prod(rest),)
    return lead, rest
