"""Codes a large stack of matrices one layer after the other, so that it needs room for one layer.

`ByLayer` does so for any codec that treats layers apart (`MatrixCodec.layers_apart`); payloads,
states and results are those of the codec itself. `PerTensor` uses it for leaves of which a device
of a region holds more than `LARGEST` bytes.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.matrix import Leaf, MatrixCodec, PyTree, Shape
from lowcomm_jax.compression.row_sharding import RowCut, axes_inside

LARGEST = 1 << 27  # bytes


def by_layer(codec: MatrixCodec, shape: Shape, cut: RowCut) -> MatrixCodec:
    """The codec, or `ByLayer` of it where a device's part of the stack is too large at once.

    Args:
      cut: how the leaf lies inside the region; those in windows are coded whole.
    """
    sizes = axes_inside()
    devices = math.prod(sizes.get(a, 1) for a in (*cut.layers, *cut.rows, *cut.columns))
    large = 4 * math.prod(shape) > LARGEST * devices
    apart = codec.layers_apart and cut.windows is None and not cut.layers
    return ByLayer(codec) if large and apart and shape[0] > 1 else codec


@dataclasses.dataclass(frozen=True)
class ByLayer(MatrixCodec):
    """`codec`, one layer at a time."""

    codec: MatrixCodec

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def requantizable(self) -> bool:
        return self.codec.requantizable

    def init(self, shape: Shape, seed: int) -> PyTree:
        return self.codec.init(shape, seed)

    def encode(self, x_LxNxM: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
        def one(given):
            return _first(self.codec.encode(*_stacked(given)))

        return jax.lax.map(one, (x_LxNxM, state))

    def encode_with_residual(
        self,
        x_LxNxM: jax.Array,
        state: PyTree,
        residual_LxNxM: jax.Array,
        decay: float,
        accepted: jax.Array | None,
    ) -> tuple[PyTree, PyTree, jax.Array]:
        def one(residual_LxNxM, given):
            layer, x, state = given
            # Read and written in place: the loop holds one residual, not an old and a new one.
            old = jax.lax.dynamic_index_in_dim(residual_LxNxM, layer)
            payload, state, new = self.codec.encode_with_residual(
                *_stacked((x, state)), old, decay, accepted
            )
            update = jax.lax.dynamic_update_index_in_dim(residual_LxNxM, new, layer, 0)
            return update, _first((payload, state))

        layers = jnp.arange(x_LxNxM.shape[0])
        residual, coded = jax.lax.scan(one, residual_LxNxM, (layers, x_LxNxM, state))
        return *coded, residual

    def decode(self, payload: PyTree, shape: Shape) -> Leaf:
        one = (1, *shape[1:])
        return jax.lax.map(lambda coded: self.codec.decode(_stacked(coded), one)[0], payload)

    def aggregate(self, payload_R: PyTree, weight_R: jax.Array, shape: Shape) -> Leaf:
        one = (1, *shape[1:])

        def mean(coded_R):
            coded_R = jax.tree.map(lambda x: x[:, None], coded_R)
            return self.codec.aggregate(coded_R, weight_R, one)[0]

        return jax.lax.map(mean, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), payload_R))

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, shape: Shape, energy: float
    ) -> jax.Array | None:
        one = (1, *shape[1:])

        def rank(coded_R):
            coded_R = jax.tree.map(lambda x: x[:, None], coded_R)
            return self.codec.mean_rank(coded_R, weight_R, one, energy)

        by_layer_R = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), payload_R)
        if jax.eval_shape(rank, _first(by_layer_R)) is None:
            return None
        return jnp.mean(jax.lax.map(rank, by_layer_R))

    def rows_together(self, shape: Shape) -> int:
        return self.codec.rows_together(shape)

    def unit(self, shape: Shape) -> int:
        return self.codec.unit(shape)

    def splits_over(self, shape: Shape, devices: int) -> bool:
        return self.codec.splits_over(shape, devices)

    def nbytes(self, shape: Shape) -> int:
        return self.codec.nbytes(shape)


def _stacked(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], tree)


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)
