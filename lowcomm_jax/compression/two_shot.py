"""Chooses between two ways to reduce coded payloads, and cuts trees into slices for the second.

`route` takes a codec and the shapes of the fragments. It returns the way that sends fewer bytes,
with the codec that encodes for it. It raises ValueError where two-shot is asked for and impossible.

* all-gather: every region sends its payload to all others, which decode and average. One
  quantisation; each region sends (R - 1) payloads.
* two-shot: regions exchange slices, decode, average in fp32, encode again and gather. Each region
  sends 2 (R - 1) / R payloads. Values are quantised twice, the second time without error feedback:
  the errors of both add up. Blocks and codebooks are those of a slice, both times.

`Sliced` is the codec of a two-shot reduction: it encodes each slice of a tree on its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.compression import windows
from lowcomm_jax.compression.base import Codec, Wrapper
from lowcomm_jax.compression.matrix import matrix_shape
from lowcomm_jax.compression.row_sharding import RowCut, axes_inside
from lowcomm_jax.compression.rules import PerTensor
from lowcomm_jax.compression.windows import UnitSplit, Windows
from lowcomm_jax.params.fragments import path_name

PyTree = Any
Shape = tuple[int, ...]


class Route(NamedTuple):
    """The way in which payloads are reduced.

    Attributes:
      name: `all_gather` or `two_shot`, as in `exchange.traffic`.
      all_gather, two_shot: bytes sent by one of R regions. two_shot is None where the mean cannot
        be encoded again: sparse, low-rank and sign codecs, and EF21, whose copies would differ.
      codec: that encodes for this route.
    """

    name: str
    all_gather: int
    two_shot: int | None
    codec: Codec


def route(codec: Codec, likes: Sequence[PyTree], regions: int, devices: int = 1) -> Route:
    """Choose how payloads of these shapes travel: by `PerTensor.reduce`, else by fewer bytes.

    With equal bytes it is the all-gather, which quantises once.

    Args:
      codec: of the method.
      likes: shapes of every fragment.
      devices: devices of a region that rows may be cut over.

    Raises:
      ValueError: two-shot is asked for and impossible; or a wrapper does not say whether two-shot
        works (`wrapper_problem`).
    """
    if (problem := wrapper_problem(codec)) is not None:
        raise ValueError(problem)
    gather = (regions - 1) * sum(codec.nbytes(like) for like in likes)
    inner = per_tensor(codec)
    wanted = "auto" if inner is None else inner.reduce
    if inner is None or not all(inner.requantizable(like) for like in likes):
        if wanted == "two_shot":
            raise ValueError(f"{codec.name}: reduce='two_shot' cannot encode a mean a second time")
        return Route("all_gather", gather, None, codec)
    cut = _in_slices(codec, regions, devices)
    shot = round(2 * (regions - 1) * sum(cut.nbytes(like) for like in likes) / regions)
    if wanted == "two_shot" or (wanted == "auto" and shot < gather):
        return Route("two_shot", gather, shot, cut)
    return Route("all_gather", gather, shot, codec)


def wrapper_problem(codec: Codec) -> str | None:
    """A problem if a wrapper does not say whether payloads may be cut into slices, else None."""
    if isinstance(codec, Wrapper):
        if codec.in_slices is None:
            return (
                f"codec {codec.name}: {type(codec).__name__} wraps a codec and does not say "
                "whether that may encode slices (two-shot): set in_slices = True in the class, or "
                "False to send every payload to every region"
            )
        return wrapper_problem(codec.codec)
    fields = dataclasses.fields(codec) if dataclasses.is_dataclass(codec) else ()
    wrapped = [f.name for f in fields if isinstance(getattr(codec, f.name), Codec)]
    if not wrapped:
        return None
    return (
        f"codec {codec.name}: {type(codec).__name__} holds another codec in {', '.join(wrapped)}, "
        "and nobody can unwrap it: derive it from compression.base.Wrapper, which has it in `codec`"
    )


def _in_slices(codec: Codec, parts: int, devices: int) -> Codec:
    if _opens(codec):
        return dataclasses.replace(codec, codec=_in_slices(codec.codec, parts, devices))
    return Sliced(codec, parts, devices)


def per_tensor(codec: Codec) -> PerTensor | None:
    """The `PerTensor` codec inside wrappers that let it encode slices; None when there is none."""
    if _opens(codec):
        return per_tensor(codec.codec)
    return codec if isinstance(codec, PerTensor) else None


def slices_of(codec: Codec | None) -> Sliced | None:
    """The `Sliced` codec inside wrappers; None unless payloads are reduced two-shot."""
    if _opens(codec):
        return slices_of(codec.codec)
    return codec if isinstance(codec, Sliced) else None


def _opens(codec: Codec | None) -> bool:
    return isinstance(codec, Wrapper) and bool(codec.in_slices)


@dataclasses.dataclass(frozen=True)
class Sliced(Wrapper):
    """Encode `parts` slices of every leaf; payload leaves carry a leading axis of that length.

    Slices take the rows of a matrix in turn; of a short matrix or a vector the single values; of
    stacked leaves the rows within each layer. They do so within each device's share, so that every
    device holds its part of every slice. A share that does not divide is padded by repeating its
    last entry. Where that would pad by more than a quarter, slices take turns over all entries at
    once, and devices hold columns, or values, of every slice. Scales and codebooks are those of a
    slice, so they depend on `devices`.

    Attributes:
      codec: a `PerTensor` without state.
      parts: number of slices.
      devices: devices of a region, over all or some of which leaves may be cut.
      cuts: how leaves are cut inside a region, as the exchange says (`with_layout`).
    """

    in_slices: ClassVar[bool | None] = False  # it is the codec of the slices
    codec: PerTensor
    parts: int
    devices: int = 1
    cuts: Mapping[str, RowCut] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.codec.name

    def init(self, like: PyTree) -> PyTree:
        return self.codec.init(self.slice_like(like))

    def encode(self, tree: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        codec = self._of_slices(tree)
        encode = jax.vmap(lambda one: codec.encode(one, ())[0])
        return encode(self._map(self._cut, tree)), state

    def decode(self, payload: PyTree, like: PyTree) -> PyTree:
        one, codec = self.slice_like(like), self._of_slices(like)
        slices = jax.vmap(lambda coded: codec.decode(coded, one))(payload)
        return self._map(self._join, like, slices)

    def aggregate(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        return Codec.aggregate(self, payload_R, weight_R, like)

    def reduce_slice(self, slice_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        """The coded weighted mean of one slice of everyone's payload; leaves `[R, ...]`."""
        one, codec = self.slice_like(like), self._of_slices(like)
        return codec.encode(codec.aggregate(slice_R, weight_R, one), ())[0]

    def nbytes(self, like: PyTree) -> int:
        return self.parts * self.codec.nbytes(self.slice_like(like))

    def rows_together(self, path: str, shape: tuple[int, ...]) -> int:
        stacked, together = self.codec.is_stacked(path), self.codec.rows_together(path, shape)
        layout = self._layout(shape, stacked)
        if layout.count % layout.groups:
            return layout.count  # devices hold unequal numbers of rows: as units, not as rows
        # Rows that do not divide over any devices: slices take them whole, on every part of the
        # columns alike.
        rows = matrix_shape(shape, stacked)[1]
        whole = layout.row and self.devices > 1 and math.gcd(rows, self.devices) == 1
        if whole and layout.groups == 1 and not together:
            return together
        if not layout.row or layout.groups == 1:
            return self.parts * max(together, 1)
        if not together:
            return together
        # Where a device could not code its part of a slice, it is given the whole leaf.
        return 1 if self._codes_parts(path, layout) else layout.count

    def splits_over(self, path: str, shape: tuple[int, ...], devices: int) -> bool:
        layout = self._layout(shape, self.codec.is_stacked(path))
        if layout.groups == 1:
            lies = layout.row[0] % devices if layout.row else layout.count % (self.parts * devices)
            apart = self.codec.rows_together(path, layout.slice) == 0
            return lies == 0 and (apart or self.codec.splits_over(path, layout.slice, devices))
        if layout.groups % devices or not self._codes_parts(path, layout):
            return False
        unit, rest = math.prod(layout.row), math.prod(shape[len(layout.lead) :])
        return UnitSplit(rest, unit, devices).works()

    def with_layout(self, cuts: Mapping[str, RowCut]) -> Codec:
        return dataclasses.replace(self, cuts=cuts)

    def slice_like(self, like: PyTree) -> PyTree:
        """Shapes of one slice of every leaf."""

        def one(path, leaf):
            layout = self._layout(leaf.shape, self.codec.is_stacked(path))
            return jax.ShapeDtypeStruct(layout.slice, jnp.float32)

        return self._map(one, like)

    def _map(self, fn, tree: PyTree, *rest: PyTree) -> PyTree:
        """fn(path, leaf, *entries of `rest`) for every leaf."""

        def one(path, leaf, *others):
            return fn(path_name(path), leaf, *others)

        return jax.tree_util.tree_map_with_path(one, tree, *rest)

    def _layout(self, shape: Shape, stacked: bool) -> SliceLayout:
        """How a leaf of this shape is cut into slices."""
        lead, rest = (shape[:1], shape[1:]) if stacked else ((), shape)
        _, rows, width = matrix_shape(shape, stacked)
        by_value = len(rest) < 2 or rows < self.parts
        count, row = (math.prod(rest), ()) if by_value else (rows, (width,))
        if not by_value or count % self.devices == 0:
            held = -(-count // self.devices)
            each = -(-held // self.parts)
            if 4 * self.devices * each * self.parts <= 5 * count:
                return SliceLayout(lead, count, self.devices, each, row)
        return SliceLayout(lead, count, 1, -(-count // self.parts), row)

    def _codes_parts(self, path: str, layout: SliceLayout) -> bool:
        """Whether every device can code its part of a slice of each group."""
        together = self.codec.rows_together(path, layout.slice)
        if together == 0 or (layout.row and layout.each % together == 0):
            return True
        return self.codec.splits_over(path, layout.slice, layout.groups)

    def _of_slices(self, like: PyTree) -> PerTensor:
        """The codec with the layout of slices: cut along rows or values, as their leaf is."""
        cuts = {}

        def one(path, leaf):
            whole = self.cuts.get(path, RowCut())
            layout = self._layout(leaf.shape, self.codec.is_stacked(path))
            together = self.codec.rows_together(path, layout.slice)
            cuts[path] = whole
            if whole.windows is None and (not whole.rows or together == 0):
                return
            axes = whole.rows or whole.columns
            by_columns = layout.by_columns and whole.windows is not None
            by_rows = bool(layout.row) and not by_columns
            if together == 0:
                cuts[path] = RowCut(whole.layers, *((axes, ()) if by_rows else ((), axes)))
            elif by_rows and layout.each % together == 0:
                cuts[path] = RowCut(whole.layers, axes)
            else:
                lead, sizes = len(layout.lead), axes_inside()
                cut = (lead + int(by_columns), axes, math.prod(sizes[axis] for axis in axes))
                parts = Windows(layout.slice, lead == 1, whole.layers, (cut,))
                cuts[path] = RowCut(whole.layers, axes, (), parts)

        self._map(one, like)
        return self.codec.with_layout(cuts)

    def _cut(self, path: str, x: jax.Array) -> jax.Array:
        """`[(L,) rows, ...]` -> `[parts, (L,) rows / parts, ...]`: row i goes to i mod parts."""
        layout = self._layout(x.shape, self.codec.is_stacked(path))
        lead, split, moved = layout.lead, layout.split, self.cuts.get(path, RowCut()).windows
        if moved is not None and layout.groups == 1:
            matrices = (math.prod(lead), layout.count, *layout.row)
            x = windows.cut_columns(moved, x, matrices) if layout.row else moved.flatten(x)
        elif moved is not None:
            x = moved.to_units(moved.flatten(x), math.prod(layout.row))
            x = moved.regroup(x, split) if layout.count % layout.groups else x
        elif layout.count % layout.groups:
            x = x.reshape(*lead, layout.count, *layout.row)
            x = jnp.take(x, split.slots.reshape(-1), axis=len(lead))
        x, axis = x.reshape(*lead, layout.groups, split.each, *layout.row), len(lead) + 1
        missing = layout.each * self.parts - split.each
        if missing:
            width = [(0, missing if a == axis else 0) for a in range(x.ndim)]
            x = jnp.pad(x, width, mode="edge")
        x = x.reshape(*lead, layout.groups, layout.each, self.parts, *layout.row)
        return jnp.moveaxis(x, axis + 1, 0).reshape(self.parts, *layout.slice)

    def _join(self, path: str, like: Any, slices: jax.Array) -> jax.Array:
        """Inverse of `_cut`, without the padding."""
        layout = self._layout(like.shape, self.codec.is_stacked(path))
        lead, split, moved = layout.lead, layout.split, self.cuts.get(path, RowCut()).windows
        axis = len(lead) + 1
        x = slices.reshape(self.parts, *lead, layout.groups, layout.each, *layout.row)
        x = jnp.moveaxis(x, 0, axis + 1)
        x = x.reshape(*lead, layout.groups, layout.each * self.parts, *layout.row)
        x = jax.lax.slice_in_dim(x, 0, split.each, axis=axis)
        if moved is not None and layout.groups == 1:
            x = x.reshape(math.prod(lead), layout.count, *layout.row)
            return windows.join_columns(moved, x) if layout.row else moved.unflatten(x)
        if moved is not None:
            units = x.reshape(math.prod(lead), layout.groups * split.each, math.prod(layout.row))
            units = moved.ungroup(units, split) if layout.count % layout.groups else units
            return moved.unflatten(moved.from_units(units))
        if layout.count % layout.groups:
            x = x.reshape(*lead, -1, *layout.row)
            x = jnp.take(x, split.filled, axis=len(lead))
        return x.reshape(like.shape)


class SliceLayout(NamedTuple):
    """How one leaf, `[*lead, count, *row]`, is cut into slices, which take entries in turn.

    An entry is a row or a single value. Neighbouring entries form groups, and every slice has
    `each` entries of every group.

    Attributes:
      lead: the layer axis, if stacked.
      count: number of entries.
      groups: number of groups: one a device, or 1 for all entries together.
      each: entries of one group in one slice, padding included.
      row: shape of a row, () of a value.
    """

    lead: Shape
    count: int
    groups: int
    each: int
    row: Shape

    @property
    def slice(self) -> Shape:
        """Shape of a slice."""
        return (*self.lead, self.groups * self.each, *self.row)

    @property
    def by_columns(self) -> bool:
        """Whether devices that do not hold whole rows of a slice cut it along columns."""
        return bool(self.row) and self.groups == 1

    @property
    def split(self) -> UnitSplit:
        """The entries over the groups, as evenly as they go."""
        return UnitSplit(self.count, 1, self.groups)
