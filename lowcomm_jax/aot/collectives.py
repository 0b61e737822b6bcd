"""Transfers of a compiled program between devices: kind, mesh axis, bytes, times.

Bytes are those that one device sends, in groups of D devices. An all-gather sends (D - 1) operands,
and a reduce-scatter or all-to-all (D - 1) / D of the operand. An all-reduce sends 2 (D - 1) / D of
it, and a permute all of it. Asynchronous pairs count once. Between the slices of TPUs a collective
is a send and a recv, whose attributes name its kind.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from lowcomm_jax.aot.hlo import HloArray, Instruction, Program
from lowcomm_jax.mesh.regions import AXES, REGION
from lowcomm_jax.mesh.stages import STAGE

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
)
_RINGS = ("all-reduce", "all-gather", "reduce-scatter", "collective-broadcast")
_BETWEEN_SLICES = '_xla_megascale_transfer_type="(\\w+)"'


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: HLO's name.
      axes: mesh axes along which the devices of a group differ.
      arrays: operands of one device.
      groups: numbers of the devices that exchange with one another, in the mesh's order.
      nbytes: bytes that one device sends each time it runs (see the module docstring).
      times: how often it runs; a loop whose number of trips is traced counts once.
      name, computation: of its HLO instruction, and the computation that holds it.
      op_name, source: JAX's name of the operation, and the line of Python it comes from.
      rate: bytes a second at which one device sends them; None = between regions, where `network`
        knows it.
      waited: seconds that a device waits for it, all runs together (`timeline`).
      beside: seconds of kernels that run between its start and its end, all runs together.
    """

    kind: str
    axes: tuple[str, ...]
    arrays: tuple[HloArray, ...]
    groups: tuple[tuple[int, ...], ...]
    nbytes: int
    times: float
    name: str
    computation: str
    op_name: str
    source: str
    rate: float | None = None
    waited: float = 0.0
    beside: float = 0.0

    @property
    def group(self) -> int:
        """Number of devices that exchange with one another."""
        return len(self.groups[0])

    @property
    def in_ring(self) -> bool:
        """Whether devices pass parts on along a ring; the others send straight to one another."""
        return self.kind in _RINGS

    @property
    def crosses(self) -> bool:
        """Whether it moves anything between regions."""
        return REGION in self.axes

    @property
    def is_routed(self) -> bool:
        """Whether it hands microbatches to the next stage in another region (random routing).

        A permute has pairs of devices, not groups: each pair crosses with all of it or not at all.
        """
        return self.kind == "collective-permute" and set(self.axes) == {REGION, STAGE}

    @property
    def total(self) -> int:
        return round(self.nbytes * self.times)

    @property
    def is_control(self) -> bool:
        """Whether it moves norms, weights or counts: payloads are never all-reduced."""
        values = sum(array.size for array in self.arrays)
        return values <= 1 or (self.kind == "all-reduce" and values <= 64)

    @property
    def scalar_bytes(self) -> int:
        """Of `total`, the bytes of single values that travel along with a payload."""
        single = sum(array.nbytes for array in self.arrays if array.size == 1)
        return round(_sent(self.kind, single, self.group) * self.times)


class MixedGroupsError(ValueError):
    """A collective whose groups mix regions with devices inside them."""


def collectives(program: Program, mesh_shape: Sequence[int], partitions: int) -> list[Collective]:
    """All collectives of a program, in the order in which they are scheduled.

    Args:
      mesh_shape: sizes of `mesh.regions.AXES`.
      partitions: devices that run one copy of the program: all of the mesh, or, on TPU, one slice.
    """
    found = []
    slices = math.prod(mesh_shape) // partitions
    inside = (mesh_shape[0] // slices, *mesh_shape[1:])
    for one, computation, times in program.instructions():
        if one.base not in KINDS or one.opcode.endswith("-done"):
            continue
        kind = _kind(one)
        if kind == "send":  # to the host
            continue
        arrays = _operands(program, one, computation)
        groups = device_groups(one, partitions)
        axes = (REGION,) if one.base == "send" else _varying(groups, inside)
        if not axes:  # groups of one device: nothing moves
            continue
        found.append(
            Collective(
                kind=kind,
                axes=axes,
                arrays=arrays,
                groups=tuple(map(tuple, groups)),
                nbytes=_sent(kind, sum(a.nbytes for a in arrays), len(groups[0])),
                times=times,
                name=one.name,
                computation=computation,
                op_name=one.op_name,
                source=program.source(one),
            )
        )
    return found


def _kind(one: Instruction) -> str:
    between = one.attribute(_BETWEEN_SLICES)
    kind = between.lower().replace("_", "-") if between else one.base
    return "collective-permute" if kind == "one-to-one" else kind


def across_regions(found: Sequence[Collective]) -> list[Collective]:
    """Those between regions.

    Raises:
      MixedGroupsError: one mixes regions with devices inside them, so that no bytes are only the
        links'.
    """
    crossing = [one for one in found if one.crosses]
    mixed = [one for one in crossing if len(one.axes) > 1]
    if mixed:
        lines = (
            f"{one.kind} of {one.arrays[0]} over {'+'.join(one.axes)}: {one.op_name}"
            for one in mixed
        )
        raise MixedGroupsError(
            "groups mix regions with devices inside them:\n- " + "\n- ".join(lines)
        )
    return crossing


def device_groups(one: Instruction, partitions: int) -> list[list[int]]:
    """Numbers of the devices that exchange, in the mesh's order; between slices, of the slices."""
    text = one.attributes
    between = re.search(r'_xla_megascale_target="?(\{[^"_]*)', text)
    if between:  # "{1,2}x{0:3}": slices x chips; or groups of 100000 x slice + chip; slices from 1
        named = re.match(r"\{([\d,]+)\}x", between[1])
        ids = re.findall(r"\d+", named[1] if named else between[1])
        return [sorted({int(i) - 1 if named else int(i) // 100_000 - 1 for i in ids})]
    pairs = re.search(r"source_target_pairs=\{((?:\{[\d,]+\},?)*)\}", text)
    if pairs:
        return [[int(i) for i in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])]
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", text)
    if listed:
        groups = [
            [int(i) for i in g.split(",") if i] for g in re.findall(r"\{([\d,]*)\}", listed[1])
        ]
        return [g for g in groups if g] or [list(range(partitions))]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, dims = (tuple(map(int, iota[i].split(","))) for i in (1, 2))
        order = tuple(map(int, iota[3].split(","))) if iota[3] else tuple(range(len(dims)))
        numbers = np.arange(math.prod(dims)).reshape(dims).transpose(order)
        return numbers.reshape(shape[0], -1).tolist()
    named = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)
    if named:
        sizes = {k: int(v) for k, v in re.findall(r"'?([\w.]+)'?=(\d+)", named[1])}
        over = re.findall(r"[\w.]+", named[2])
        names = list(sizes)
        rest = [n for n in names if n not in over]
        numbers = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        moved = numbers.transpose([names.index(n) for n in (*rest, *over)])
        return moved.reshape(-1, math.prod(sizes[n] for n in over)).tolist()
    return [list(range(partitions))]


def _varying(groups: Sequence[Sequence[int]], shape: Sequence[int]) -> tuple[str, ...]:
    """Mesh axes along which the members of a group differ, in any group."""
    differ = np.zeros(len(shape), bool)
    for group in groups:
        where = np.stack(np.unravel_index(np.asarray(group), shape), axis=1)
        differ |= (where != where[0]).any(axis=0)
    return tuple(axis for axis, is_so in zip(AXES, differ) if is_so)


def _operands(program: Program, one: Instruction, computation: str) -> tuple[HloArray, ...]:
    """Arrays that one device puts in."""
    known = program.named(computation)
    read = [known[name] for name in one.operands if name in known]
    if one.base == "send":
        read = read[:1]  # the others are tokens
    return tuple(array for each in read for array in each.arrays if array.dtype != "token")


def _sent(kind: str, nbytes: int, group: int) -> int:
    if kind == "all-gather":
        return (group - 1) * nbytes
    if kind == "all-reduce":
        return round(2 * (group - 1) / group * nbytes)
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return round((group - 1) / group * nbytes)
    return nbytes
