"""Static partition of a parameter pytree into fragments that travel one at a time.

A *unit* is the smallest part that a fragment is made of:

- all leaves of one transformer block, found by the integer in their path (`blocks/3/...`);
- one row of a scanned stack (leaves under a path named in `stacked`, leading axis = layers). Where
  the stack is cut over S pipeline stages, a unit is one row of every stage, so that no fragment
  moves rows between stages;
- any other single leaf.

Fragments of equal shape inside one stack share one compiled program, since the row numbers are
traced.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.refused import refuse

PyTree = Any
Pattern = Literal["sequential", "strided", "balanced", "balanced_tensors"]
UNFIT = "fragments cannot be cut"
BLOCK = re.compile(r"(?:^|[/_])(\d+)(?:/|$)")


def path_name(path: Sequence[Any]) -> str:
    """`blocks/0/mlp/up` for a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_stacked(name: str, stacked: Sequence[str]) -> bool:
    """Whether a leaf's path is one of the path prefixes `stacked`, or lies under one of them."""
    return any(name == s or name.startswith(f"{s}/") for s in stacked)


def layer_stacks(stacked: Sequence[str]) -> tuple[str, ...]:
    """Those of the path prefixes of which a row is taken for a layer of the model: top-level ones.

    Others are inside of something, as a layer's experts are.

    >>> layer_stacks(["blocks", "block1/experts"])
    ('blocks',)
    """
    return tuple(prefix for prefix in stacked if "/" not in prefix)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a fragment: leaf `name`, whole (`rows` is None) or some rows of its leading axis."""

    name: str
    rows: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Fragments:
    """K fragments that cover a flat dict of leaves exactly once.

    Attributes:
      shapes: leaf name -> `jax.ShapeDtypeStruct` of one region's leaf.
      parts: for each fragment its pieces, in leaf order.
      stages: equal parts of a sliced leaf's leading axis, of which all give the same rows.
    """

    shapes: dict[str, jax.ShapeDtypeStruct]
    parts: tuple[tuple[Piece, ...], ...]
    stages: int = 1

    def __len__(self) -> int:
        return len(self.parts)

    def like(self, p: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of fragment p for one region."""
        out = {}
        for piece in self.parts[p]:
            whole = self.shapes[piece.name]
            shape = whole.shape if piece.rows is None else (len(piece.rows), *whole.shape[1:])
            out[piece.name] = jax.ShapeDtypeStruct(shape, whole.dtype)
        return out

    def numel(self, p: int) -> int:
        return sum(math.prod(leaf.shape) for leaf in self.like(p).values())

    def rows(self, p: int) -> dict[str, np.ndarray]:
        """Row numbers of the sliced pieces of fragment p, to be passed as traced arguments.

        int32 `[n]`; with stages `[S, n]`, counted within each stage's part.
        """
        found = {}
        for piece in self.parts[p]:
            if piece.rows is None:
                continue
            rows = np.array(piece.rows, np.int32)
            if self.stages > 1:
                each = self.shapes[piece.name].shape[0] // self.stages
                rows = rows.reshape(self.stages, -1) % np.int32(each)
            found[piece.name] = rows
        return found

    def leaves(self, tree: dict[str, jax.Array], p: int) -> dict[str, jax.Array]:
        """The leaves fragment p touches, unsliced (host side, no copy)."""
        return {piece.name: tree[piece.name] for piece in self.parts[p]}


def take(leaves: dict[str, jax.Array], rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Cut the fragment out of its leaves; rows lie on axis 1, behind the region or anchor axis."""
    return {k: _take(x, rows[k]) if k in rows else x for k, x in leaves.items()}


def _take(leaf: jax.Array, rows: jax.Array) -> jax.Array:
    if rows.ndim == 1:
        return jnp.take(leaf, rows, axis=1)
    taken = jnp.take(_by_stage(leaf, rows), rows[0], axis=2)
    return taken.reshape(leaf.shape[0], -1, *leaf.shape[2:])


def _by_stage(leaf: jax.Array, rows: jax.Array) -> jax.Array:
    """`[R, S C, ...]` -> `[R, S, C, ...]`: what lies in a stage stays there."""
    return leaf.reshape(leaf.shape[0], rows.shape[0], -1, *leaf.shape[2:])


def put(leaves: dict[str, jax.Array], rows: dict[str, jax.Array], values: dict[str, jax.Array]):
    """Write a fragment back into its leaves; inverse of `take`."""
    return {k: _put(x, rows[k], values[k]) if k in rows else values[k] for k, x in leaves.items()}


def _put(leaf: jax.Array, rows: jax.Array, value: jax.Array) -> jax.Array:
    if rows.ndim == 1:
        return leaf.at[:, rows].set(value)
    put = _by_stage(leaf, rows).at[:, :, rows[0]].set(_by_stage(value, rows))
    return put.reshape(leaf.shape)


def partition(
    shapes: dict[str, jax.ShapeDtypeStruct],
    fragments: int,
    pattern: Pattern | Sequence[str] = "strided",
    rest: Literal["own", "dealt"] = "dealt",
    stacked: Sequence[str] = (),
    stages: int = 1,
) -> Fragments:
    """Cut a flat dict of leaves into K fragments.

    Args:
      shapes: leaf name -> shape and dtype of one region's leaf.
      fragments: K.
      pattern: one of these. `sequential`: consecutive units. `strided`: unit l to fragment l mod K
        (arXiv 2501.18512). `balanced`: the largest unit first, into the fragment with the fewest
        bytes. `balanced_tensors`: the same for single tensors, not whole blocks. Or a sequence of
        K regular expressions, each of which matches the leaves of one fragment.
      rest: where leaves outside the blocks go (embeddings, head, norms): into their `own` fragment
        (the last one), or `dealt` to the fragments like blocks.
      stacked: path prefixes whose leaves carry a leading layer axis (scanned blocks).
      stages: parts of that axis that lie in different pipeline stages; it divides by them.

    Raises:
      Refused: more fragments than units, a regex that leaves leaves out or claims one twice.
    """
    _check_stacked(shapes, stacked, stages)
    if not isinstance(pattern, str):
        return _by_regex(shapes, fragments, pattern)
    blocks, others = _units(shapes, stacked, stages)
    if pattern == "balanced_tensors":
        blocks, pattern = [[piece] for unit in blocks for piece in unit], "balanced"
    own = rest == "own" and bool(blocks) and bool(others) and fragments > 1
    dealt = blocks if own else _in_tree_order(shapes, blocks + others)
    bins = fragments - 1 if own else fragments
    if bins > len(dealt) or fragments < 1:
        line = (
            f"fragments={fragments}: the parameters have only {len(dealt) + own} units to deal "
            f"(blocks, rows of stacked leaves{' of a stage' * (stages > 1)}, other leaves); use at "
            "most that many"
        )
        refuse(UNFIT, [line])
    groups = _deal(shapes, dealt, bins, pattern)
    if own:
        groups.append([piece for unit in others for piece in unit])
    return Fragments(dict(shapes), tuple(_merge_rows(shapes, g) for g in groups), stages)


def _units(shapes, stacked, stages: int) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """Split leaves into blocks (by path number or stacked row) and single other leaves."""
    blocks: dict[Any, list[Piece]] = {}
    others = []
    for name, leaf in shapes.items():
        prefix = next((s for s in stacked if is_stacked(name, [s])), None)
        found = BLOCK.search(name)
        if prefix is not None:
            each = leaf.shape[0] // stages
            for row in range(each):
                rows = tuple(range(row, leaf.shape[0], each))
                blocks.setdefault((prefix, row), []).append(Piece(name, rows))
        elif found:
            key = (name[: found.start()], int(found.group(1)))
            blocks.setdefault(key, []).append(Piece(name, None))
        else:
            others.append([Piece(name, None)])
    return [blocks[key] for key in sorted(blocks)], others


def _check_stacked(shapes, stacked: Sequence[str], stages: int) -> None:
    problems = []
    for prefix in stacked:
        under = [n for n in shapes if is_stacked(n, [prefix])]
        if not under:
            problems.append(f"stacked={prefix!r} matches no leaf: remove or correct it")
        for name in under:
            if not shapes[name].shape:
                problems.append(f"{name!r} under stacked={prefix!r} is a scalar: it has no rows")
            elif shapes[name].shape[0] % stages:
                rows = shapes[name].shape[0]
                problems.append(f"{name!r} has {rows} rows for {stages} stages: pad it")
    refuse(UNFIT, problems)


def _in_tree_order(shapes, units: list[list[Piece]]) -> list[list[Piece]]:
    """Units where their kind first appears in the tree; blocks of one kind by number."""
    order = {name: i for i, name in enumerate(shapes)}

    def place(unit: list[Piece]) -> tuple:
        name = unit[0].name
        found = BLOCK.search(name)
        if unit[0].rows is not None or not found:
            return order[name], unit[0].rows or ()
        kind = name[: found.start()]
        first = min(order[n] for n in shapes if BLOCK.search(n) and n.startswith(kind))
        return first, (int(found.group(1)),)

    return sorted(units, key=place)


def _bytes(shapes, unit: Sequence[Piece]) -> int:
    total = 0
    for piece in unit:
        leaf = shapes[piece.name]
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        total += size if piece.rows is None else size // leaf.shape[0] * len(piece.rows)
    return total


def _deal(shapes, units, bins: int, pattern: str) -> list[list[Piece]]:
    groups: list[list[Piece]] = [[] for _ in range(bins)]
    if pattern == "strided":
        for i, unit in enumerate(units):
            groups[i % bins] += unit
    elif pattern == "sequential":
        for i, unit in enumerate(units):
            groups[i * bins // len(units)] += unit
    else:  # balanced
        load = [0] * bins
        order = sorted(range(len(units)), key=lambda i: -_bytes(shapes, units[i]))
        for i in order:
            lightest = load.index(min(load))
            groups[lightest] += units[i]
            load[lightest] += max(_bytes(shapes, units[i]), 1)
    return groups


def _merge_rows(shapes, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Join the rows of one leaf into one piece, in leaf order; all rows become the whole leaf."""
    rows: dict[str, list[int] | None] = {}
    for piece in pieces:
        if piece.rows is None:
            rows[piece.name] = None
        else:
            rows.setdefault(piece.name, []).extend(piece.rows)
    merged = []
    for name in shapes:
        if name in rows:
            taken = rows[name]
            whole = taken is None or len(taken) == shapes[name].shape[0]
            merged.append(Piece(name, None if whole else tuple(sorted(taken))))
    return tuple(merged)


def _by_regex(shapes, fragments: int, patterns: Sequence[str]) -> Fragments:
    problems = [line for pattern in patterns for line in _broken(pattern)]
    refuse(UNFIT, problems)
    if len(patterns) != fragments:
        problems.append(f"{len(patterns)} regexes for fragments={fragments}: give one each")
    hits = {name: [i for i, p in enumerate(patterns) if re.search(p, name)] for name in shapes}
    for name, found in hits.items():
        if not found:
            problems.append(f"leaf {name!r} is in no fragment: widen a regex, e.g. add {name!r}")
        if len(found) > 1:
            problems.append(f"leaf {name!r} is claimed by regexes {found}: let one claim it")
    empty = [i for i in range(len(patterns)) if not any(i in f for f in hits.values())]
    problems += [f"regex {patterns[i]!r} matches no leaf: remove or correct it" for i in empty]
    refuse(UNFIT, problems)
    parts = [
        tuple(Piece(name, None) for name in shapes if hits[name] == [i]) for i in range(fragments)
    ]
    return Fragments(dict(shapes), tuple(parts))


def _broken(pattern: str) -> list[str]:
    try:
        re.compile(pattern)
    except re.error as error:
        return [f"regex {pattern!r} is no regular expression ({error}): correct it"]
    return []
