"""Gives each leaf its codec: that of the first regular expression that finds the leaf's path."""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.base import Codec, as_rounded
from lowcomm_jax.compression.by_layer import ByLayer, by_layer
from lowcomm_jax.compression.cast import FP32
from lowcomm_jax.compression.codebook import Statistical
from lowcomm_jax.compression.matrix import MatrixCodec, matrix_shape
from lowcomm_jax.compression.row_sharding import InWindows, RowCut, rows_cut
from lowcomm_jax.compression.windows import Windows
from lowcomm_jax.params.fragments import is_stacked, path_name
from lowcomm_jax.refused import one_of, refuse

PyTree = Any
_SMALL_MATRIX = 64 * 64
Rules = tuple[tuple[str, MatrixCodec], ...]

NORMS_AND_BIASES = r"(?i)(^|[/_.])(bias|scale|norm\w*|\w*norm|ln\w*)($|[/_.])"
EMBEDDINGS = r"(?i)(^|[/_.])(emb\w*|wte|wpe|unembed\w*)($|[/_.])|(^|[/.])(\w+_)?head($|[/.])"

EXEMPT_SMALL: Rules = ((NORMS_AND_BIASES, FP32),)
LANGUAGE_MODEL: Rules = (*EXEMPT_SMALL, (EMBEDDINGS, Statistical(bits=8, scope="row")))
PRESETS: dict[str, Rules] = {
    "none": (),
    "exempt_small": EXEMPT_SMALL,
    "language_model": LANGUAGE_MODEL,
}


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """How one leaf is coded."""

    codec: MatrixCodec
    shape: tuple[int, ...]
    matrices: tuple[int, int, int]
    seed: int
    windows: Windows | None = None

    @property
    def in_units(self) -> bool:
        """Whether the codec is handed windows, not a matrix."""
        return self.windows is not None and self.codec.rows_together(self.matrices) > 0

    def stack(self, x: jax.Array) -> jax.Array | InWindows:
        """The leaf as its codec takes it."""
        if self.windows is None:
            return x.reshape(self.matrices)
        if self.in_units:
            return InWindows(self.windows.flatten(x), self.matrices)
        return self.windows.to_matrix(x, self.matrices)

    def shaped(self, x: jax.Array | InWindows) -> jax.Array:
        """Inverse of `stack`."""
        if self.windows is None:
            return x.reshape(self.shape)
        return self.windows.unflatten(x.flat) if self.in_units else self.windows.from_matrix(x)


@dataclasses.dataclass(frozen=True)
class PerTensor(Codec):
    """Code every leaf on its own: by the first rule that matches its path, else by `default`.

    Attributes:
      default: codec of leaves that no rule names.
      rules: (regular expression, codec) pairs, searched in the path (`blocks/0/mlp/up`).
      stacked: path prefixes whose leaves carry a leading layer axis, as in
        `params.fragments.partition`: each layer is a matrix of its own.

      seed: of random starts and choices; the same in every region.
      label: name in tables; default: the default codec's.
      cuts: (path, how the leaf is cut inside a region) pairs, from the exchange.
      reduce: how payloads are averaged: by the route of fewer bytes (`auto`), `all_gather` or
        `two_shot` (`two_shot.route`).

    Raises:
      ValueError: a rule's expression does not compile; an unknown `reduce`.
    """

    default: MatrixCodec
    rules: Rules = ()
    stacked: tuple[str, ...] = ()
    seed: int = 0
    label: str | None = None
    reduce: Literal["auto", "all_gather", "two_shot"] = "auto"
    cuts: tuple[tuple[str, RowCut], ...] = ()

    def __post_init__(self) -> None:
        problems = [_broken(pattern) for pattern, _ in self.rules]
        problems.append(one_of("reduce", self.reduce, ("auto", "all_gather", "two_shot")))
        refuse("PerTensor", problems)

    @property
    def name(self) -> str:
        return self.label or self.default.name

    def codec_of(self, path: str) -> MatrixCodec:
        """The codec of the leaf with this path."""
        return next((c for pattern, c in self.rules if re.search(pattern, path)), self.default)

    def sent_whole(self, like: PyTree) -> list[str]:
        """Paths of the matrices larger than 64 x 64 of which a codec sends all, though it should
        choose (`MatrixCodec.sends_all`).
        """

        def one(leaf, path):
            _, n, m = leaf.matrices
            large = min(n, m) > 1 and n * m > _SMALL_MATRIX
            return path if large and leaf.codec.sends_all(leaf.matrices) else None

        names = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), like)
        return [path for path in self._map(one, like, names) if path is not None]

    def is_stacked(self, name: str) -> bool:
        """Whether the leaf of this path carries a leading layer axis."""
        return is_stacked(name, self.stacked)

    def rows_together(self, path: str, shape: tuple[int, ...]) -> int:
        leaf = self._named(path, shape)
        return leaf.codec.rows_together(leaf.matrices)

    def splits_over(self, path: str, shape: tuple[int, ...], devices: int) -> bool:
        leaf = self._named(path, shape)
        return leaf.codec.splits_over(leaf.matrices, devices)

    def with_layout(self, cuts: Mapping[str, RowCut]) -> PerTensor:
        return dataclasses.replace(self, cuts=tuple(cuts.items()))

    def _leaf(self, path, leaf) -> _Leaf:
        return self._named(path_name(path), leaf.shape)

    def _named(self, name: str, shape: tuple[int, ...]) -> _Leaf:
        stacked = self.is_stacked(name)
        codec = FP32 if math.prod(shape) == 0 else self.codec_of(name)
        seed = (zlib.crc32(name.encode()) + self.seed) % 2**31
        return _Leaf(codec, shape, matrix_shape(shape, stacked), seed)

    def _map(self, fn: Callable, like: PyTree, *rest: PyTree) -> list:
        """fn(leaf description, *entries of `rest`) for every leaf, in order."""
        with_path, treedef = jax.tree_util.tree_flatten_with_path(like)
        columns = [treedef.flatten_up_to(tree) for tree in rest]
        cuts, results = dict(self.cuts), []
        for (path, leaf), *row in zip(with_path, *columns):
            plain = self._leaf(path, leaf)
            cut = cuts.get(path_name(path), RowCut())
            codec = by_layer(plain.codec, plain.matrices, cut)
            leaf = dataclasses.replace(plain, codec=codec, windows=cut.windows)
            with rows_cut(cut if leaf.in_units else cut._replace(windows=None)):
                results.append(fn(leaf, *row))
        return results

    def init(self, like: PyTree) -> PyTree:
        states = self._map(lambda leaf: leaf.codec.init(leaf.matrices, leaf.seed), like)
        # A codec without arrays has the state (), not a tree of empty leaves.
        return tuple(states) if jax.tree.leaves(states) else ()

    def encode(self, tree: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        treedef, states = jax.tree.structure(tree), self._states(tree, state)

        def one(leaf, x, own):
            return leaf.codec.encode(leaf.stack(as_rounded(x.astype(jnp.float32))), own)

        coded = self._map(one, tree, tree, states)
        payload = treedef.unflatten([c[0] for c in coded])
        return payload, (tuple(c[1] for c in coded) if state != () else ())

    def encode_with_residual(
        self,
        tree: PyTree,
        state: PyTree,
        residual: PyTree,
        decay: float,
        accepted: jax.Array | None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        if not any(self._map(lambda leaf: isinstance(leaf.codec, ByLayer), tree)):
            return super().encode_with_residual(tree, state, residual, decay, accepted)
        treedef = jax.tree.structure(tree)

        def one(leaf, x, own, e):
            given = (leaf.stack(x.astype(jnp.float32)), own, leaf.stack(e), decay, accepted)
            payload, own, e = leaf.codec.encode_with_residual(*given)
            return payload, own, leaf.shaped(e)

        coded = self._map(one, tree, tree, self._states(tree, state), residual)
        payload, own, residual = (treedef.unflatten(part) for part in zip(*coded))
        return payload, (tuple(treedef.flatten_up_to(own)) if state != () else ()), residual

    def _states(self, tree: PyTree, state: PyTree) -> PyTree:
        """Every leaf's own state."""
        treedef = jax.tree.structure(tree)
        return treedef.unflatten(state if state != () else ((),) * treedef.num_leaves)

    def decode(self, payload: PyTree, like: PyTree) -> PyTree:
        def one(leaf, coded):
            return leaf.shaped(leaf.codec.decode(coded, leaf.matrices))

        return jax.tree.structure(like).unflatten(self._map(one, like, payload))

    def aggregate(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        def one(leaf, coded_R):
            return leaf.shaped(leaf.codec.aggregate(coded_R, weight_R, leaf.matrices))

        return jax.tree.structure(like).unflatten(self._map(one, like, payload_R))

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, like: PyTree, energy: float
    ) -> jax.Array | None:
        def one(leaf, coded_R):
            rank = leaf.codec.mean_rank(coded_R, weight_R, leaf.matrices, energy)
            return None if rank is None else (rank, math.prod(leaf.shape))

        found = [r for r in self._map(one, like, payload_R) if r is not None]
        total = sum(numel for _, numel in found)
        if not found:
            return None
        first, *rest = (rank * (numel / total) for rank, numel in found)
        return sum(rest, first)

    def nbytes(self, like: PyTree) -> int:
        return sum(self._map(lambda leaf: leaf.codec.nbytes(leaf.matrices), like))

    def requantizable(self, like: PyTree) -> bool:
        """Whether every leaf may be encoded a second time (see `MatrixCodec.requantizable`)."""
        return all(self._map(lambda leaf: leaf.codec.requantizable, like))


def _broken(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"rule {pattern!r} is not a regular expression ({error}): correct it"
    return None
