"""Runs a codec in every pipeline stage: each stage encodes only its own part of a tree.

No values then move between stages. A table cut over the stages is encoded slice by slice: low-rank
factors, and scales of whole tensors, are those of a slice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.row_sharding import RowCut
from lowcomm_jax.compression.two_shot import slices_of
from lowcomm_jax.mesh.stages import STAGE, over_stages, stage_axis, stage_part, total

PyTree = Any
Leaves = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Staged(Codec):
    """Trees are flat dicts by leaf name; leaves of payloads and states are `[S, ...]`.

    Payloads in slices (`Sliced`) are `[parts, S, ...]`: every stage has its part of each slice.

    A leaf that every stage has whole is coded, and travels, in each of them.

    Attributes:
      codec: of one stage's part.
      mesh: with a `stage` axis of S devices.
      specs: leaf name -> PartitionSpec of the whole leaf.
    """

    codec: Codec
    mesh: Mesh
    specs: dict[str, P]

    @property
    def stages(self) -> int:
        """S, number of pipeline stages."""
        return self.mesh.shape[STAGE]

    @property
    def personal(self) -> bool:
        return self.codec.personal

    @property
    def increments(self) -> bool:
        return self.codec.increments

    @property
    def keeps_residual(self) -> bool:
        return self.codec.keeps_residual

    @property
    def name(self) -> str:
        return self.codec.name

    def rows_together(self, path: str, shape: tuple[int, ...]) -> int:
        """As `MatrixCodec.rows_together`, of a stage's part; `shape` is that of the part."""
        return self.codec.rows_together(path, shape)

    def splits_over(self, path: str, shape: tuple[int, ...], devices: int) -> bool:
        return self.codec.splits_over(path, shape, devices)

    def with_layout(self, cuts: Mapping[str, RowCut]) -> Codec:
        return dataclasses.replace(self, codec=self.codec.with_layout(cuts))

    def at(self, level: int) -> Codec:
        return dataclasses.replace(self, codec=self.codec.at(level))

    def init(self, like: PyTree) -> PyTree:
        return self._spread(self.codec.init(self.part(like)))

    def encode(self, tree: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        def one(codec, tree, state):
            payload, state = codec.encode(tree, _own(state))
            return _behind(payload, self._at), _behind(state)

        out = (self._payload_spec(), P(STAGE))
        return self._over((self._cut(tree), P(STAGE)), out, one)(tree, state)

    def encode_if(self, accepted: jax.Array, tree: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        def one(codec, accepted, tree, state):
            payload, state = codec.encode_if(accepted, tree, _own(state))
            return _behind(payload, self._at), _behind(state)

        out = (self._payload_spec(), P(STAGE))
        return self._over((P(), self._cut(tree), P(STAGE)), out, one)(accepted, tree, state)

    def decode(self, payload: PyTree, like: PyTree) -> PyTree:
        def one(codec, payload):
            return codec.decode(_own(payload, self._at), self.part(like))

        return self._over((self._payload_spec(),), self._cut(like), one)(payload)

    def aggregate(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        def one(codec, payload_R, weight_R):
            return codec.aggregate(_own(payload_R, axis=1), weight_R, self.part(like))

        return self._over((P(None, STAGE), P()), self._cut(like), one)(payload_R, weight_R)

    def reduce_slice(self, slice_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        """`Sliced.reduce_slice` in every stage; leaves `[R, S, ...]` -> `[S, ...]`."""

        def one(codec, slice_R, weight_R):
            own = _own(slice_R, axis=1)
            return _behind(codec.reduce_slice(own, weight_R, self.part(like)))

        return self._over((P(None, STAGE), P()), P(STAGE), one)(slice_R, weight_R)

    def nbytes(self, like: PyTree) -> int:
        return self.stages * self.codec.nbytes(self.part(like))

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, like: PyTree, energy: float
    ) -> jax.Array | None:
        """The mean over the stages of the rank that each measures."""

        def one(codec, payload_R, weight_R):
            own = _own(payload_R, axis=1)
            rank = codec.mean_rank(own, weight_R, self.part(like), energy)
            return None if rank is None else total(rank) / self.stages

        return self._over((P(None, STAGE), P()), P(), one)(payload_R, weight_R)

    def receive(self, mean: PyTree, state: PyTree, sent: jax.Array) -> tuple[PyTree, PyTree]:
        def one(codec, mean, state, sent):
            mean, state = codec.receive(mean, _own(state), sent)
            return mean, _behind(state)

        cut = self._cut(mean)
        return self._over((cut, P(STAGE), P()), (cut, P(STAGE)), one)(mean, state, sent)

    def part(self, like: Leaves) -> Leaves:
        """Shapes of one stage's part."""

        def one(name, leaf):
            axis, shape = stage_axis(self.specs[name]), list(leaf.shape)
            if axis is not None:
                shape[axis] //= self.stages
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        return {name: one(name, leaf) for name, leaf in like.items()}

    @property
    def _at(self) -> int:
        """Where payload leaves carry the stages."""
        return 0 if slices_of(self.codec) is None else 1

    def _payload_spec(self) -> P:
        return P(*(None,) * self._at, STAGE)

    def _cut(self, tree: Leaves) -> dict[str, P]:
        return {name: stage_part(self.specs[name]) for name in tree}

    def _over(self, in_specs, out_specs, one):
        """`one(codec, *args)` in every stage."""
        stage = functools.partial(one, self.codec)
        return over_stages(stage, self.mesh, in_specs, out_specs)

    def _spread(self, tree: PyTree) -> PyTree:
        """The same in every stage, leaves `[S, ...]`."""

        def one(x):
            x = jnp.asarray(x)
            return jnp.broadcast_to(x[None], (self.stages, *x.shape))

        return jax.tree.map(one, tree)


def _own(tree: PyTree, axis: int = 0) -> PyTree:
    return jax.tree.map(lambda x: jnp.squeeze(x, axis), tree)


def _behind(tree: PyTree, axis: int = 0) -> PyTree:
    return jax.tree.map(lambda x: jnp.expand_dims(x, axis), tree)
