"""Lays leaves out inside a region for encoding, so that every device encodes its own part.

In: a fragment's leaves, their layouts, and the codec. Out: the same leaves by rows (`to_rows`) and
back (`from_rows`); layouts of payloads and codec states; and the codec with the layout of its
leaves (`codec_with_layout`). `RowPlan` is the decision for one leaf:

- A codec's blocks and chunks are cut on the global shape, along rows. A matrix whose columns are
  sharded is therefore spread by rows before it is encoded, with one all-to-all inside the region. A
  device sends all but one n-th of its own shard, and none holds the whole matrix.
- Codecs that encode value by value, or by matrix products, take a matrix in its own layout
  (`Codec.rows_together` of 0).
- Other leaves, such as vectors, keep their layout. Their codec splits them into whole blocks or
  chunks (`compression.windows`).
- Leaves with too few blocks or chunks for the devices are gathered inside the region.

Values of a pipeline stage stay in it. A stage's part of a leaf is laid out as a leaf of its own
(`compression.Staged`), and leaves of payloads and states have a leading stage axis.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.matrix import first_column, matrix_shape
from lowcomm_jax.compression.row_sharding import RowCut
from lowcomm_jax.compression.staged import Staged
from lowcomm_jax.compression.windows import Windows
from lowcomm_jax.mesh.regions import REGION, Regions, axis_names
from lowcomm_jax.mesh.stages import STAGE, stage_axis
from lowcomm_jax.params.fragments import is_stacked, path_name
from lowcomm_jax.params.sharding import NEAR_SCALAR, SpecFn, leaf_of

PyTree = Any


class RowPlan(NamedTuple):
    """How one leaf is laid out while it is coded.

    Attributes:
      spec: the layout inside a stage, without its axis.
      row: axis of the rows.
      moves: the (axis, mesh axes) whose cuts the rows take over, () = the leaf stays as it lies.
      windows: of a leaf that its codec splits into units; None = it is coded as `spec` says.
    """

    spec: P
    row: int
    moves: tuple[tuple[int, tuple[str, ...]], ...]
    windows: Windows | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Layouts of a fragment's leaves while they are coded.

    Attributes:
      regions: the regions and their mesh.
      codec: says which rows are coded together.
      stacked: path prefixes of leaves with a leading layer axis.
    """

    regions: Regions
    codec: Codec
    stacked: tuple[str, ...] = ()

    def specs(self, like: PyTree, specs: PyTree) -> PyTree:
        """Layout by rows of every leaf."""
        return self._map(
            lambda name, leaf, spec: self._plan(name, leaf.shape, spec).spec, like, specs
        )

    def coded_specs(self, like: PyTree, specs: PyTree) -> PyTree:
        """Layout of every leaf while it is encoded: by rows, after the stage axis."""

        def one(name, leaf, spec):
            return self._with_stage(self._plan(name, leaf.shape, spec).spec, spec)

        return self._map(one, like, specs)

    @property
    def _front(self) -> tuple[str, ...]:
        """Mesh axes that payloads and states carry in front."""
        return (STAGE,) if isinstance(self.codec, Staged) else ()

    def codec_with_layout(self, like: PyTree, specs: PyTree) -> Codec:
        """The codec with the layout of these leaves."""

        def cut(name, leaf, spec):
            plan = self._plan(name, leaf.shape, spec)
            return name, self._cut(name, self._own_shape(name, leaf.shape), plan)

        pairs = jax.tree.structure(like).flatten_up_to(self._map(cut, like, specs))
        return self.codec.with_layout(dict(pairs))

    def first(self, otherwise: SpecFn) -> SpecFn:
        """Layout that cuts rows over `fsdp`, where every device can then encode its own part."""

        def spec(name: str, leaf: jax.ShapeDtypeStruct) -> P:
            by_rows = P(*(None,) * self._row(name), "fsdp")
            plan = self._plan(name, leaf.shape, by_rows)
            kept = plan.spec != P() and plan.windows is None and len(leaf.shape) > 1
            return by_rows if kept else otherwise(name, leaf)

        return spec

    def to_rows(self, tree: PyTree, specs: PyTree, lead: str | None = REGION) -> PyTree:
        """Leaves `[R or A, ...]` that lie as `specs` say, spread by rows.

        Args:
          lead: mesh axis of the leading axis; None = replicated.
        """
        return self._reshard(tree, specs, lead, back=False)

    def from_rows(self, tree: PyTree, specs: PyTree, lead: str | None = REGION) -> PyTree:
        """Inverse of `to_rows`."""

        return self._reshard(tree, specs, lead, back=True)

    def payload_specs(self, payload: PyTree, like: PyTree, specs: PyTree, lead: int = 1) -> PyTree:
        """Layout of payload leaves after their first `lead` axes.

        They are cut like the rows, or the rows and columns, that they encode. Where no axis of a
        payload leaf divides, it is replicated inside the region.
        """
        front = self._front

        def one(x, cut):
            axes = (*cut.layers, *cut.rows, *cut.columns)
            matrix = cut.layers, cut.rows, cut.columns
            # Behind the layers come the rows, blocks or chunks.
            shape = x.shape[lead + len(front) :]
            counts = [self._devices(names) for names in (cut.layers, cut.rows, cut.columns)]
            if len(shape) == 3 and not any(n % count for n, count in zip(shape, counts)):
                return P(*front, *matrix)
            fitting = [i for i, n in enumerate(shape) if i and n and n % self._devices(axes) == 0]
            cut = axes and fitting
            return P(*front, *(None,) * fitting[0], axes) if cut else P(*front)

        def leaf(name, like, spec, coded):
            plan = self._plan(name, like.shape, spec)
            cut = self._cut(name, self._own_shape(name, like.shape), plan)
            return jax.tree.map(lambda x: one(x, cut), coded)

        return self._map(leaf, like, specs, payload)

    def place(self, tree_R: PyTree, specs: PyTree) -> PyTree:
        """Constrain leaves `[R, ...]` to `specs`, which are without the region axis (traced)."""
        leaves, treedef = jax.tree.flatten(tree_R)
        where = [self.regions.sharding(REGION, *s) for s in treedef.flatten_up_to(specs)]
        return treedef.unflatten(jax.lax.with_sharding_constraint(leaves, where))

    def state_specs(self, state: PyTree, like: PyTree, specs: PyTree) -> PyTree:
        """Layout of a codec's state of one region.

        Residuals lie by rows. A state with a row for each row or column of a leaf's matrices (the
        basis of `LowRank`) is cut like the leaf. The rest is whole on every device of the region.

        Raises:
          ValueError: an array of more than a few values belongs to no leaf, by its path, while
            leaves are cut: it would be whole on every device.
        """
        by_rows, front = self.specs(like, specs), self._front
        own = self.codec.part(like) if front else like
        inside = jax.tree.structure(like).flatten_up_to(specs)
        cut = any(self._names(spec, dim) for spec in inside for dim in range(len(spec)))

        def one(path, x):
            name, shape = leaf_of(path, state, like), x.shape[len(front) :]
            if name is None:
                if cut and math.prod(shape) > NEAR_SCALAR:
                    raise ValueError(self._homeless(path, shape))
                return P(*front)
            if own[name].shape == shape:
                return P(*front, *by_rows[name])
            spec = by_rows[name]
            axes = tuple(a for dim in range(len(spec)) for a in self._names(spec, dim))
            sides = matrix_shape(own[name].shape, self._row(name) == 1)
            beside = len(shape) == 3 and shape[0] == sides[0] and shape[1] in sides[1:]
            if beside and axes and shape[1] % self._devices(axes) == 0:
                return P(*front, None, axes)
            return P(*front)

        return jax.tree_util.tree_map_with_path(one, state)

    def _homeless(self, path: tuple, shape: tuple[int, ...]) -> str:
        return (
            f"codec {self.codec.name}: its state {jax.tree_util.keystr(path)} {list(shape)} stands "
            "under no leaf's name, so every device of a region would hold all of it; keep an array "
            "for each leaf, in dicts with the keys of `like` (jax.tree.map over `like` makes them)"
        )

    def _names(self, spec: P, dim: int) -> tuple[str, ...]:
        """Mesh axes, of more than one device, that cut a dimension inside a stage."""
        entry = spec[dim] if dim < len(spec) else None
        sizes = self.regions.mesh.shape
        return tuple(a for a in axis_names(entry) if sizes[a] > 1 and a not in self._front)

    def _row(self, name: str) -> int:
        return int(is_stacked(name, self.stacked))

    def _own_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a stage's part of a leaf."""
        if not self._front:
            return shape
        return self.codec.part({name: jax.ShapeDtypeStruct(shape, "float32")})[name].shape

    def _plan(self, name: str, shape: tuple[int, ...], spec: P) -> RowPlan:
        shape = self._own_shape(name, shape)
        if self._front:
            spec = P(*(self._names(spec, dim) or None for dim in range(len(spec))))
        row = self._row(name)
        cuts = [(dim, self._names(spec, dim)) for dim in range(row, len(shape))]
        axes = tuple(axis for _, names in cuts for axis in names)
        if not axes:
            return RowPlan(spec, row, ())
        together = self.codec.rows_together(name, shape)
        if together == 0 and self._matrix_cut(name, shape, spec) is not None:
            return RowPlan(spec, row, ())
        held, rest = divmod(shape[row], self._devices(axes))
        held *= matrix_shape(shape, row == 1)[1] // max(shape[row], 1)
        if len(shape) < row + 2 or rest or held % max(together, 1):
            return self._in_windows(name, shape, spec, row)
        moves = tuple((dim, names) for dim, names in cuts[1:] if names)
        return RowPlan(P(*list(spec)[:row], *(None,) * (row - len(spec)), axes), row, moves)

    def _in_windows(self, name: str, shape: tuple[int, ...], spec: P, row: int) -> RowPlan:
        """The plan of a leaf that rows do not fit: coded as it lies, or gathered if too small."""

        cuts = [(dim, self._names(spec, dim)) for dim in range(row, len(shape))]
        cuts = tuple((dim, names, self._devices(names)) for dim, names in cuts if names)
        layers = self._names(spec, 0) if row else ()
        windows = Windows(shape, row == 1, layers, cuts)
        if self.codec.rows_together(name, shape) == 0:
            works = windows.matrix_axis(matrix_shape(shape, row == 1)) is not None
        else:
            works = self.codec.splits_over(name, shape, windows.devices)
        return RowPlan(spec, row, (), windows) if works else RowPlan(P(), row, ())

    def _cut(self, name: str, shape: tuple[int, ...], plan: RowPlan) -> RowCut:
        """How the codec finds `[L, N, M]` of a leaf, or its units."""
        moved = plan.windows
        if moved is None:
            return RowCut(*(axis_names(e) for e in self._matrix_cut(name, shape, plan.spec)))
        by_columns = self.codec.rows_together(name, shape) == 0 and (
            moved.matrix_axis(matrix_shape(shape, plan.row == 1)) == 2
        )
        rows, columns = ((), moved.axes) if by_columns else (moved.axes, ())
        return RowCut(moved.layers, rows, columns, moved)

    def _matrix_cut(self, name: str, shape: tuple[int, ...], spec: P) -> P | None:
        """How `[L, N, M]` of a leaf of this layout is cut; None where devices hold no submatrix."""
        row = self._row(name)
        at = first_column(shape, row == 1)
        cuts = {dim: names for dim in range(row, len(shape)) if (names := self._names(spec, dim))}
        if any(dim not in (row, at) or shape[dim] % self._devices(cuts[dim]) for dim in cuts):
            return None
        rows, columns = cuts.get(row) if at > row else None, cuts.get(at)
        return P(self._names(spec, 0) if row else None, rows, columns)

    def _devices(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.regions.mesh.shape[a] for a in axes)

    def _reshard(self, tree: PyTree, specs: PyTree, lead: str | None, back: bool) -> PyTree:
        plans = self._map(lambda name, x, spec: self._plan(name, x.shape[1:], spec), tree, specs)
        leaves, treedef = jax.tree.flatten(tree)
        plans, own = treedef.flatten_up_to(plans), treedef.flatten_up_to(specs)
        by_rows = [self._with_stage(plan.spec, spec) for plan, spec in zip(plans, own)]
        before, after = (by_rows, own) if back else (own, by_rows)
        swapped = [i for i, plan in enumerate(plans) if plan.moves]
        if swapped:
            found = jax.shard_map(
                lambda xs: [_swap(x, plans[i], back) for x, i in zip(xs, swapped)],
                mesh=self.regions.mesh,
                in_specs=([P(lead, *before[i]) for i in swapped],),
                out_specs=[P(lead, *after[i]) for i in swapped],
                check_vma=False,
            )([leaves[i] for i in swapped])
            for i, x in zip(swapped, found):
                leaves[i] = x
        where = [self.regions.sharding(lead, *spec) for spec in after]
        return treedef.unflatten(jax.lax.with_sharding_constraint(leaves, where))

    def _with_stage(self, layout: P, spec: P) -> P:
        """The layout of a whole leaf, whose stages lie as `spec` says."""
        axis = stage_axis(spec) if self._front else None
        if axis is None:
            return layout
        entries = [*layout, *(None,) * (axis + 1 - len(layout))]
        entries[axis] = (STAGE, *axis_names(entries[axis]))
        return P(*entries)

    def _map(self, fn, tree: PyTree, *rest: PyTree) -> PyTree:
        """fn(leaf name, leaf, *entries of `rest`) for every leaf."""
        with_path, treedef = jax.tree_util.tree_flatten_with_path(tree)
        columns = [treedef.flatten_up_to(one) for one in rest]
        rows = [fn(path_name(p), x, *row) for (p, x), *row in zip(with_path, *columns)]
        return treedef.unflatten(rows)


def _swap(x: jax.Array, plan: RowPlan, back: bool) -> jax.Array:
    """One device's shard `[A, ...]` from its layout to that by rows, or back."""
    for dim, axes in reversed(plan.moves) if back else plan.moves:
        split, join = (dim, plan.row) if back else (plan.row, dim)
        x = jax.lax.all_to_all(x, axes, split_axis=split + 1, concat_axis=join + 1, tiled=True)
    return x
