"""Two ways to reduce coded payloads, their bytes, and which codec each of them takes.

* all-gather: every region hands its payload to all others, who decode and average. One
  quantisation; each region sends (R - 1) payloads.
* two-shot: slices are exchanged, decoded, averaged in fp32, encoded again and gathered. Each region
  sends 2 (R - 1) / R payloads, but what arrives has been quantised twice, the second time without
  error feedback.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.compression import windows
from lowcomm_jax.compression.base import Codec, Wrapper
from lowcomm_jax.compression.error_feedback import ErrorFeedback
from lowcomm_jax.compression.matrix import matrix_shape
from lowcomm_jax.compression.row_sharding import RowCut, axes_inside
from lowcomm_jax.compression.rules import PerTensor
from lowcomm_jax.compression.windows import Deal, Windows
from lowcomm_jax.params.fragments import path_name

# -- sliced ------------------------------------------------------------------------------------
#
# A tree as equal slices, each encoded on its own: what a two-shot reduction exchanges.


PyTree = Any
Shape = tuple[int, ...]


class Dealt(NamedTuple):
    """How one leaf, `[*lead, count, *row]`, is dealt out: a slice has `each` of every group.

    Attributes:
      lead: the layer axis, if stacked.
      count: rows; or values, where they are dealt out one by one.
      groups: of neighbours, those of one device or, with 1, all.
      each: in a slice of a group, padding included.
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
    def deal(self) -> Deal:
        """Rows or values over the groups, as evenly as they go."""
        return Deal(self.count, 1, self.groups)


@dataclasses.dataclass(frozen=True)
class Sliced(Wrapper):
    """Encode `parts` slices of every leaf; payload leaves carry a leading axis of that length.

    Matrices are dealt out row by row, short ones and vectors value by value; stacked leaves within
    each layer. Rows and values are dealt out, and padded by repeating the last one, within each
    device's share of them, so that every device holds its part of every slice; where that would pad
    by more than a quarter, all together, and devices hold columns, or values, of every slice.
    Scales and codebooks are those of a slice, which therefore depends on `devices`.

    Attributes:
      codec: a `PerTensor` without state.
      parts: how many.
      devices: that leaves may be cut over, or over some of them.
      cuts: how leaves are cut inside a region, from the exchange.
    """

    codec: PerTensor
    parts: int
    devices: int = 1
    cuts: Mapping[str, RowCut] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.codec.name

    def init(self, like):
        return self.codec.init(self.slice_like(like))

    def encode(self, tree, state):
        codec = self._of_slices(tree)
        encode = jax.vmap(lambda one: codec.encode(one, ())[0])
        return encode(self._map(self._cut, tree)), state

    def decode(self, payload, like):
        one, codec = self.slice_like(like), self._of_slices(like)
        slices = jax.vmap(lambda coded: codec.decode(coded, one))(payload)
        return self._map(self._join, like, slices)

    def aggregate(self, payload_R, weight_R, like):
        return Codec.aggregate(self, payload_R, weight_R, like)

    def reduce_slice(self, slice_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        """The coded weighted mean of one slice of everyone's payload; leaves `[R, ...]`."""
        one, codec = self.slice_like(like), self._of_slices(like)
        return codec.encode(codec.aggregate(slice_R, weight_R, one), ())[0]

    def nbytes(self, like):
        return self.parts * self.codec.nbytes(self.slice_like(like))

    def rows_together(self, path, shape):
        stacked, together = self.codec.is_stacked(path), self.codec.rows_together(path, shape)
        dealt = self._dealt(shape, stacked)
        if dealt.count % dealt.groups:
            return dealt.count  # the rows of devices that are not all alike: in units
        # Rows that no devices can share are dealt out alike in every part of the columns.
        rows = matrix_shape(shape, stacked)[1]
        whole = dealt.row and self.devices > 1 and math.gcd(rows, self.devices) == 1
        if whole and dealt.groups == 1 and not together:
            return together
        if not dealt.row or dealt.groups == 1:
            return self.parts * max(together, 1)
        return 1 if together and self._codes_parts(path, dealt) else together

    def deals(self, path, shape, devices):
        dealt = self._dealt(shape, self.codec.is_stacked(path))
        if dealt.groups == 1:
            lies = dealt.row[0] % devices if dealt.row else dealt.count % (self.parts * devices)
            apart = self.codec.rows_together(path, dealt.slice) == 0
            return lies == 0 and (apart or self.codec.deals(path, dealt.slice, devices))
        if dealt.groups % devices or not self._codes_parts(path, dealt):
            return False
        unit, rest = math.prod(dealt.row), math.prod(shape[len(dealt.lead) :])
        return Deal(rest, unit, devices).works()

    def laid(self, cuts):
        return dataclasses.replace(self, cuts=cuts)

    def slice_like(self, like: PyTree) -> PyTree:
        """Shapes of one slice of every leaf."""

        def one(path, leaf):
            dealt = self._dealt(leaf.shape, self.codec.is_stacked(path))
            return jax.ShapeDtypeStruct(dealt.slice, jnp.float32)

        return self._map(one, like)

    def _map(self, fn, tree: PyTree, *rest: PyTree) -> PyTree:
        """fn(path, leaf, *entries of `rest`) for every leaf."""

        def one(path, leaf, *others):
            return fn(path_name(path), leaf, *others)

        return jax.tree_util.tree_map_with_path(one, tree, *rest)

    def _dealt(self, shape: Shape, stacked: bool) -> Dealt:
        """How a leaf of this shape is dealt out."""
        lead, rest = (shape[:1], shape[1:]) if stacked else ((), shape)
        _, rows, width = matrix_shape(shape, stacked)
        by_value = len(rest) < 2 or rows < self.parts
        count, row = (math.prod(rest), ()) if by_value else (rows, (width,))
        if not by_value or count % self.devices == 0:
            held = -(-count // self.devices)
            each = -(-held // self.parts)
            if 4 * self.devices * each * self.parts <= 5 * count:
                return Dealt(lead, count, self.devices, each, row)
        return Dealt(lead, count, 1, -(-count // self.parts), row)

    def _codes_parts(self, path: str, dealt: Dealt) -> bool:
        """Whether every device can code its part of a slice of each group."""
        together = self.codec.rows_together(path, dealt.slice)
        if together == 0 or (dealt.row and dealt.each % together == 0):
            return True
        return self.codec.deals(path, dealt.slice, dealt.groups)

    def _of_slices(self, like: PyTree) -> PerTensor:
        """The codec, told how slices are cut: along their rows or values, if their leaf is cut."""
        cuts = {}

        def one(path, leaf):
            whole = self.cuts.get(path, RowCut())
            dealt = self._dealt(leaf.shape, self.codec.is_stacked(path))
            together = self.codec.rows_together(path, dealt.slice)
            cuts[path] = whole
            if whole.windows is None and (not whole.rows or together == 0):
                return
            axes = whole.rows or whole.columns
            by_columns = dealt.by_columns and whole.windows is not None
            by_rows = bool(dealt.row) and not by_columns
            if together == 0:
                cuts[path] = RowCut(whole.layers, *((axes, ()) if by_rows else ((), axes)))
            elif by_rows and dealt.each % together == 0:
                cuts[path] = RowCut(whole.layers, axes)
            else:
                lead, sizes = len(dealt.lead), axes_inside()
                cut = (lead + int(by_columns), axes, math.prod(sizes[axis] for axis in axes))
                parts = Windows(dealt.slice, lead == 1, whole.layers, (cut,))
                cuts[path] = RowCut(whole.layers, axes, (), parts)

        self._map(one, like)
        return self.codec.laid(cuts)

    def _cut(self, path: str, x: jax.Array) -> jax.Array:
        """`[(L,) rows, ...]` -> `[parts, (L,) rows / parts, ...]`: row i goes to i mod parts."""
        dealt = self._dealt(x.shape, self.codec.is_stacked(path))
        lead, deal, moved = dealt.lead, dealt.deal, self.cuts.get(path, RowCut()).windows
        if moved is not None and dealt.groups == 1:
            matrices = (math.prod(lead), dealt.count, *dealt.row)
            x = windows.cut_columns(moved, x, matrices) if dealt.row else moved.flat(x)
        elif moved is not None:
            x = moved.units(moved.flat(x), math.prod(dealt.row))
            x = moved.share(x, deal) if dealt.count % dealt.groups else x
        elif dealt.count % dealt.groups:
            x = x.reshape(*lead, dealt.count, *dealt.row)
            x = jnp.take(x, deal.slots.reshape(-1), axis=len(lead))
        x, axis = x.reshape(*lead, dealt.groups, deal.each, *dealt.row), len(lead) + 1
        missing = dealt.each * self.parts - deal.each
        if missing:
            width = [(0, missing if a == axis else 0) for a in range(x.ndim)]
            x = jnp.pad(x, width, mode="edge")
        x = x.reshape(*lead, dealt.groups, dealt.each, self.parts, *dealt.row)
        return jnp.moveaxis(x, axis + 1, 0).reshape(self.parts, *dealt.slice)

    def _join(self, path: str, like: Any, slices: jax.Array) -> jax.Array:
        """Inverse of `_cut`, without the padding."""
        dealt = self._dealt(like.shape, self.codec.is_stacked(path))
        lead, deal, moved = dealt.lead, dealt.deal, self.cuts.get(path, RowCut()).windows
        axis = len(lead) + 1
        x = slices.reshape(self.parts, *lead, dealt.groups, dealt.each, *dealt.row)
        x = jnp.moveaxis(x, 0, axis + 1)
        x = x.reshape(*lead, dealt.groups, dealt.each * self.parts, *dealt.row)
        x = jax.lax.slice_in_dim(x, 0, deal.each, axis=axis)
        if moved is not None and dealt.groups == 1:
            x = x.reshape(math.prod(lead), dealt.count, *dealt.row)
            return windows.join_columns(moved, x) if dealt.row else moved.lie(x)
        if moved is not None:
            units = x.reshape(math.prod(lead), dealt.groups * deal.each, math.prod(dealt.row))
            units = moved.unshare(units, deal) if dealt.count % dealt.groups else units
            return moved.lie(moved.join(units))
        if dealt.count % dealt.groups:
            x = x.reshape(*lead, -1, *dealt.row)
            x = jnp.take(x, deal.filled, axis=len(lead))
        return x.reshape(like.shape)


class Route(NamedTuple):
    """How payloads are best reduced.

    Attributes:
      name: `all_gather` or `two_shot`, as in `exchange.traffic`.
      all_gather, two_shot: bytes sent by one of R regions; two_shot is None where encoding the mean
        again makes no sense (sparse, low-rank, sign) or loses track of a copy (EF21).
      codec: what encodes for this route.
    """

    name: str
    all_gather: int
    two_shot: int | None
    codec: Codec


def route(codec: Codec, likes: Sequence[PyTree], regions: int, devices: int = 1) -> Route:
    """Choose how payloads of these shapes travel: by `PerTensor.reduce`, else by fewer bytes.

    The all-gather, quantised once, wins ties.

    Args:
      codec: as the method has it.
      likes: shapes of every fragment.
      devices: of a region, that rows may be cut over.

    Raises:
      ValueError: two-shot is asked for where it makes no sense.
    """
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


def per_tensor(codec: Codec) -> PerTensor | None:
    """The codec whose payloads travel, out of its error feedback; None when there is none."""
    if isinstance(codec, ErrorFeedback):
        return per_tensor(codec.codec)
    return codec if isinstance(codec, PerTensor) else None


def slices_of(codec: Codec | None) -> Sliced | None:
    """The sliced codec within, if payloads are reduced two-shot."""
    if isinstance(codec, ErrorFeedback):
        return slices_of(codec.codec)
    return codec if isinstance(codec, Sliced) else None


def _in_slices(codec: Codec, parts: int, devices: int) -> Codec:
    if isinstance(codec, ErrorFeedback):
        return dataclasses.replace(codec, codec=_in_slices(codec.codec, parts, devices))
    return Sliced(codec, parts, devices)
