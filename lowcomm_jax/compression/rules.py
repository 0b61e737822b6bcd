"""Gives each leaf its codec: that of the first regular expression that finds the leaf's path."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.codecs.cast import FP32
from lowcomm_jax.compression.codecs.codebook import Statistical
from lowcomm_jax.compression.grid import matrix_shape, side
from lowcomm_jax.compression.leaf import LeafCodec, bytes_of, in_units
from lowcomm_jax.compression.means import as_rounded
from lowcomm_jax.compression.placement import Placement, first, part_of_stage, place, stacked
from lowcomm_jax.compression.units import UnitCodec
from lowcomm_jax.mesh.stages import STAGE
from lowcomm_jax.params.fragments import is_stacked, path_name
from lowcomm_jax.refused import refuse
from lowcomm_jax.settings import choices

PyTree = Any
_SMALL_MATRIX = 64 * 64
Rules = tuple[tuple[str, UnitCodec | LeafCodec], ...]

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
    """How one leaf is coded, and where its parts lie."""

    codec: LeafCodec
    place: Placement
    seed: int
    staged: bool

    def _each(self, fn: Callable, *args: PyTree) -> PyTree:
        return self.place.each(fn, *args) if self.codec.layers_apart else fn(*args)

    def init(self) -> PyTree:
        if not self.staged:
            return self.codec.init(self.place, self.seed)
        stages, apart = self.place.stages, self.place.by_layers and self.codec.layers_apart
        state = self.codec.init(self.place.all_layers if apart else self.place, self.seed)

        def cut(x):
            if apart:
                return x.reshape(stages, x.shape[0] // stages, *x.shape[1:])
            return jnp.broadcast_to(x[None], (stages, *x.shape))

        return jax.tree.map(cut, state)

    def encode(self, x: jax.Array, state: PyTree, params: jax.Array | None):
        """(payload, state) of a device's part."""
        weights = None if params is None else self._split(params)

        def one(x, state, weights):
            whole = None if weights is None else self.place.whole(weights)
            return self.codec.encode(self.place.whole(as_rounded(x)), state, self.place, whole)

        payload, state = self._each(one, self._split(x), self._own(state), weights)
        return self._behind(payload), self._behind(state)

    def encode_with_residual(self, x, state, residual, params, decay, accepted):
        """(payload, state, residual); see `Codec.encode_with_residual`."""
        state = self._own(state)
        x, residual = self._split(x), self.place.split(residual)
        weights = None if params is None else self._split(params)

        def one(x, state, old, weights):
            total = as_rounded(as_rounded(x) + as_rounded(decay * old))
            whole = None if weights is None else self.place.whole(weights)
            payload, new = self.codec.encode(self.place.whole(total), state, self.place, whole)
            # What is subtracted must be the very bits that receivers decode.
            received = as_rounded(self.place.own(self.codec.decode(payload, self.place)))
            missed = total - received.reshape(total.shape)
            if accepted is not None:
                pick = functools.partial(jnp.where, accepted)
                new, missed = jax.tree.map(pick, new, state), pick(missed, old)
            return payload, new, missed

        if not (self.codec.layers_apart and self.place.one_by_one):
            payload, state, residual = one(x, state, residual, weights)
        else:

            def turn(kept, given):
                # Read and written in place: the loop holds one residual and state, not two.
                layer, x, weights = given
                at = functools.partial(jax.lax.dynamic_index_in_dim, index=layer)
                old, own = jax.tree.map(at, kept)
                payload, own, old = one(stacked(x), own, old, stacked(weights))
                put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
                return jax.tree.map(put, kept, (old, own)), first(payload)

            given = jnp.arange(x.shape[0]), x, weights
            (residual, state), payload = jax.lax.scan(turn, (residual, state), given)
        return self._behind(payload), self._behind(state), self.place.join(residual)

    def decode(self, payload: PyTree) -> jax.Array:
        def one(payload):
            return self.place.own(self.codec.decode(payload, self.place))

        return self.place.join(self._each(one, self._own(payload)))

    def mean(self, payload_R: PyTree, weight_R: jax.Array) -> jax.Array:
        def one(payload_R):
            payload_R = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), payload_R)
            return self.place.own(self.codec.mean(payload_R, weight_R, self.place))

        own_R = self._own(payload_R, axis=1)
        if not (self.codec.layers_apart and self.place.one_by_one):
            return self.place.join(self.place.own(self.codec.mean(own_R, weight_R, self.place)))
        by_layer = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), own_R)
        return self.place.join(self.place.each(one, by_layer))

    def mean_rank(self, payload_R, weight_R, energy: float) -> jax.Array | None:
        def one(payload_R):
            payload_R = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), payload_R)
            return self.codec.mean_rank(payload_R, weight_R, self.place, energy)

        by_layer = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), self._own(payload_R, axis=1))
        if not self.codec.layers_apart or jax.eval_shape(one, by_layer) is None:
            return None
        if self.place.one_by_one:
            rank = jnp.mean(jax.lax.map(lambda x: one(stacked(x)), by_layer))
        else:
            rank = one(by_layer)
        axes = (*self.place.axes[0], *((STAGE,) if self.staged else ()))
        return jax.lax.pmean(rank, axes) if axes else rank

    def _split(self, x: jax.Array) -> jax.Array:
        return self.place.split(x.astype(jnp.float32))

    def _own(self, tree: PyTree, axis: int = 0) -> PyTree:
        """Arrays of this device's stage, without the axis of the stages."""
        return jax.tree.map(lambda x: jnp.squeeze(x, axis), tree) if self.staged else tree

    def _behind(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[None], tree) if self.staged else tree

    def deal(self, payload: PyTree) -> PyTree:
        """The payload's arrays in slices."""
        return jax.tree.map(lambda x: self._by_stage(self.place.deal, x, axis=0, out=1), payload)

    def undeal(self, slices: PyTree) -> PyTree:
        """Inverse of `deal`."""
        return jax.tree.map(lambda x: self._by_stage(self.place.undeal, x, axis=1, out=0), slices)

    def recode(self, coded_R: PyTree, weight_R: jax.Array, number: jax.Array) -> PyTree:
        def code(coded_R):
            return self.codec.recode(coded_R, weight_R, number, self.place)

        return self._by_stage(code, coded_R, axis=1, out=0)

    def _by_stage(self, fn: Callable, tree: PyTree, axis: int, out: int) -> PyTree:
        """`fn` of the arrays of each stage, whose axis stands at `axis` before and `out` after."""
        return jax.vmap(fn, axis, out)(tree) if self.staged else fn(tree)

    @property
    def front(self) -> tuple[str, ...]:
        """Mesh axes that arrays of payloads and states carry in front."""
        return (STAGE,) if self.staged else ()


@dataclasses.dataclass(frozen=True)
class PerTensor(Codec):
    """Code every leaf on its own: by the first rule that matches its path, else by `default`.

    Attributes:
      default: codec of leaves that no rule names.
      rules: (regular expression, codec) pairs, searched in the path (`blocks/0/mlp/up`).
      stacked: path prefixes whose leaves carry a leading layer axis, as in
        `params.fragments.partition`: each layer is a matrix of its own.
      seed: of random starts and choices; the same in every region.
      reduce: how payloads are averaged: by the route of fewer bytes (`auto`), `all_gather` or
        `two_shot` (`two_shot.route`).
      slices: that payloads are cut into (`in_slices`); 1 = they go whole.
      where: (path, placement) pairs, from `placed`.
      staged: whether pipeline stages code their own parts, as `placed` says.

    Raises:
      ValueError: a rule's expression does not compile; an unknown `reduce`.
    """

    default: UnitCodec | LeafCodec
    rules: Rules = ()
    stacked: tuple[str, ...] = ()
    seed: int = 0
    reduce: Literal["auto", "all_gather", "two_shot"] = "auto"
    slices: int = 1
    where: tuple[tuple[str, Placement], ...] = ()
    staged: bool = False

    def __post_init__(self) -> None:
        problems = [_broken(pattern) for pattern, _ in self.rules]
        for codec in (self.default, *(codec for _, codec in self.rules)):
            if not isinstance(codec, UnitCodec | LeafCodec):
                problems.append(f"{codec!r} codes no leaf: give a UnitCodec or a LeafCodec")
        refuse("PerTensor", problems + choices(PerTensor, self))

    @property
    def name(self) -> str:
        return self.default.name

    @property
    def local(self) -> bool:
        return True

    @property
    def reads_params(self) -> bool:
        return any(codec.reads_params for codec in (self.default, *(c for _, c in self.rules)))

    def codec_of(self, path: str) -> UnitCodec | LeafCodec:
        """The codec of the leaf with this path."""
        return next((c for pattern, c in self.rules if re.search(pattern, path)), self.default)

    def sent_whole(self, like: PyTree) -> list[str]:
        """Paths of the matrices larger than 64 x 64 of which a codec sends all, though it should
        choose (`UnitCodec.sends_all`).
        """

        def one(leaf, path):
            _, n, m = leaf.place.matrices
            large = min(n, m) > 1 and n * m > _SMALL_MATRIX
            return path if large and leaf.codec.sends_all(leaf.place) else None

        names = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), like)
        return [path for path in self._map(one, like, names) if path is not None]

    def is_stacked(self, name: str) -> bool:
        """Whether the leaf of this path carries a leading layer axis."""
        return is_stacked(name, self.stacked)

    # -- where leaves lie --------------------------------------------------------------------------

    @property
    def places(self) -> dict[str, Placement]:
        return dict(self.where)

    def placed(
        self, like: PyTree, specs: Mapping[str, P], sizes: Mapping[str, int], staged: bool
    ) -> PerTensor:
        """See `Codec.placed`.

        Raises:
          ValueError: a leaf is cut so that no device holds whole units, and too large to gather.
        """

        def one(path, leaf):
            name, stack = path_name(path), self.is_stacked(path_name(path))
            spec = specs.get(name, P())
            _, shape = part_of_stage(leaf.shape, spec, sizes[STAGE] if staged else 1)
            codec, alone = self._codec(name, shape), self._on_one_device(name, shape)
            in_shares, nbytes = codec.in_shares(alone.matrices), 0
            if in_shares and self.slices > 1:
                nbytes = bytes_of(codec.payload_like(alone))
            given = leaf.shape, stack, spec, sizes, staged, in_shares, nbytes, self.slices
            return name, place(alone.unit, *given)

        with_path = jax.tree_util.tree_flatten_with_path(like)[0]
        placed = copy.copy(self)
        # Past the checks of settings, which are the same.
        object.__setattr__(placed, "where", tuple(one(path, leaf) for path, leaf in with_path))
        object.__setattr__(placed, "staged", staged)
        return placed

    def payload_specs(self, like: PyTree, payload: PyTree = None) -> PyTree:
        def one(leaf, coded=None):
            if coded is None:
                specs = leaf.codec.payload_specs(leaf.place)
            else:
                front = len(leaf.front)
                specs = jax.tree.map(lambda x: leaf.place.array_spec(x.shape[front:]), coded)
            return jax.tree.map(lambda spec: P(*leaf.front, *spec), specs)

        specs = self._map(one, like, *(() if payload is None else (payload,)))
        return jax.tree.structure(like).unflatten(specs)

    def state_specs(self, like: PyTree) -> PyTree:
        """How devices hold the state of `init`."""

        def one(leaf):
            specs = leaf.codec.state_specs(leaf.place)
            return jax.tree.map(lambda spec: P(*leaf.front, *spec), specs)

        specs = self._map(one, like)
        return tuple(specs) if jax.tree.leaves(specs) else ()

    def _codec(self, name: str, shape: tuple[int, ...]) -> LeafCodec:
        return in_units(FP32 if math.prod(shape) == 0 else self.codec_of(name))

    def _on_one_device(self, name: str, shape: tuple[int, ...]) -> Placement:
        """How one device codes a leaf, or a stage's part of it.

        Slices of a matrix of one row, or of fewer rows than slices, may have units of their own
        (`grid_of`). Each has as many of these as take the fewest bytes:

        - as give units of a divisor of its values, or of one of a multiple of four, since a byte
          holds four of the narrowest codes;
        - as give such units where the matrix had one unit more;
        - the fewest, or up to three more.

        Such a leaf may then have to be coded in shares or gathered, since its units follow from
        bytes and never from where it lies. Layers are alike, so one of them decides for a stack,
        and for a stage's part of it.
        """
        codec, stack = self._codec(name, shape), self.is_stacked(name)
        unit = codec.unit_of(matrix_shape(shape, stack))
        usual = Placement(shape, stack, unit, self.slices)

        def with_own(count):
            return dataclasses.replace(usual, unit=unit._replace(each=count))

        as_whole = usual.grid == dataclasses.replace(usual, slices=1).grid
        joins = 1 < usual.grid.rows < self.slices and usual.grid.columns > 0
        joins = joins and with_own(1).grid != usual.grid
        if as_whole and not joins:
            return usual
        values = usual.grid.rows * usual.grid.columns
        each = -(-values // self.slices)
        even = side(each, unit.width)
        more = side(each, -(-values // (-(-values // even) + 1)))
        fours = side(each + -each % 4, unit.width)
        fewest = -(-each // unit.width)
        counts = [-(-each // width) for width in (even, more, fours)]
        counts = dict.fromkeys([*counts, *range(fewest, fewest + 4)])
        ways = [usual] * as_whole + [with_own(count) for count in counts]

        def nbytes(way):
            one = way.shape if not stack else (1, *way.shape[1:])
            return codec.dealt_nbytes(dataclasses.replace(way, shape=one))

        return min(ways, key=nbytes)

    def _map(self, fn: Callable, like: PyTree, *rest: PyTree) -> list:
        """fn(leaf description, *entries of `rest`) for every leaf, in order."""
        with_path, treedef = jax.tree_util.tree_flatten_with_path(like)
        columns = [treedef.flatten_up_to(tree) for tree in rest]
        places, results = self.places, []
        for (path, leaf), *row in zip(with_path, *columns):
            name = path_name(path)
            at = places.get(name)
            if at is None:
                at = self._on_one_device(name, leaf.shape)
            seed = (zlib.crc32(name.encode()) + self.seed) % 2**31
            description = _Leaf(self._codec(name, at.shape), at, seed, self.staged)
            results.append(fn(description, *row))
        return results

    # -- the functions of a codec ------------------------------------------------------------------

    def init(self, like: PyTree) -> PyTree:
        states = self._map(lambda leaf: leaf.init(), like)
        # A codec without arrays has the state (), not a tree of empty leaves.
        return tuple(states) if jax.tree.leaves(states) else ()

    def encode(self, tree: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        def one(leaf, x, own, weights):
            return leaf.encode(x, own, weights if leaf.codec.reads_params else None)

        coded = self._map(one, tree, tree, self._states(tree, state), self._weights(tree, params))
        payload = jax.tree.structure(tree).unflatten([c[0] for c in coded])
        return payload, (tuple(c[1] for c in coded) if state != () else ())

    def encode_with_residual(
        self,
        tree: PyTree,
        state: PyTree,
        residual: PyTree,
        decay: float,
        accepted: jax.Array | None,
        params: PyTree = None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        treedef, done = jax.tree.structure(tree), None

        def one(leaf, x, own, old, weights):
            nonlocal done
            # Leaf after leaf: else compilers hold what is between values and payload for all.
            x, _ = jax.lax.optimization_barrier((x, done))
            weights = weights if leaf.codec.reads_params else None
            payload, own, done = leaf.encode_with_residual(x, own, old, weights, decay, accepted)
            return payload, own, done

        given = tree, self._states(tree, state), residual, self._weights(tree, params)
        payload, own, residual = zip(*self._map(one, tree, *given))
        states = own if state != () else ()
        return treedef.unflatten(payload), states, treedef.unflatten(residual)

    def _states(self, tree: PyTree, state: PyTree) -> PyTree:
        """Every leaf's own state."""
        treedef = jax.tree.structure(tree)
        return treedef.unflatten(state if state != () else ((),) * treedef.num_leaves)

    def _weights(self, tree: PyTree, params: PyTree) -> PyTree:
        """Every leaf's weights, or None for each."""
        if params is None and self.reads_params:
            raise ValueError(f"codec {self.name} reads the weights: give params to encode")
        treedef = jax.tree.structure(tree)
        nothing = [None] * treedef.num_leaves
        return treedef.unflatten(nothing if params is None else treedef.flatten_up_to(params))

    def decode(self, payload: PyTree, like: PyTree) -> PyTree:
        values = self._map(lambda leaf, coded: leaf.decode(coded), like, payload)
        return jax.tree.structure(like).unflatten(values)

    def aggregate(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        means = self._map(lambda leaf, coded_R: leaf.mean(coded_R, weight_R), like, payload_R)
        return jax.tree.structure(like).unflatten(means)

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, like: PyTree, energy: float
    ) -> jax.Array | None:
        def one(leaf, coded_R):
            rank = leaf.mean_rank(coded_R, weight_R, energy)
            return None if rank is None else (rank, math.prod(leaf.place.shape))

        found = [r for r in self._map(one, like, payload_R) if r is not None]
        total = sum(numel for _, numel in found)
        if not found:
            return None
        head, *rest = (rank * (numel / total) for rank, numel in found)
        return sum(rest, head)

    def nbytes(self, like: PyTree) -> int:
        def one(leaf):
            return leaf.place.stages * bytes_of(leaf.codec.payload_like(leaf.place))

        return sum(self._map(one, like))

    # -- slices ------------------------------------------------------------------------------------

    def requantizable(self, like: PyTree) -> bool:
        return all(self._map(lambda leaf: leaf.codec.requantizable, like))

    def in_slices(self, slices: int) -> PerTensor:
        return dataclasses.replace(self, slices=slices)

    def dealt_nbytes(self, like: PyTree) -> int:
        def one(leaf):
            return leaf.place.stages * leaf.codec.dealt_nbytes(leaf.place)

        return sum(self._map(one, like))

    def deal(self, payload: PyTree, like: PyTree) -> PyTree:
        slices = self._map(lambda leaf, coded: leaf.deal(coded), like, payload)
        return jax.tree.structure(like).unflatten(slices)

    def undeal(self, slices: PyTree, like: PyTree) -> PyTree:
        coded = self._map(lambda leaf, dealt: leaf.undeal(dealt), like, slices)
        return jax.tree.structure(like).unflatten(coded)

    def recode(
        self, slice_R: PyTree, weight_R: jax.Array, number: jax.Array, like: PyTree
    ) -> PyTree:
        def one(leaf, coded_R):
            return leaf.recode(coded_R, weight_R, number)

        return jax.tree.structure(like).unflatten(self._map(one, like, slice_R))


def _broken(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"rule {pattern!r} is not a regular expression ({error}): correct it"
    return None
