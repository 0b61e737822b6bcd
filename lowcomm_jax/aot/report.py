"""Needs of an engine's programs on a target: memory, arithmetic, traffic, collectives, waiting.

`ahead_of_time` compiles them and gives an `AheadOfTime`, without a device of the target. Sizes are
bytes of one device, times seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lowcomm_jax.aot.collectives import Collective, across_regions, collectives
from lowcomm_jax.aot.hlo import Program, parse
from lowcomm_jax.aot.programs import CompiledProgram, Progress, compile_engine
from lowcomm_jax.aot.targets import Target
from lowcomm_jax.aot.timeline import KernelWork, play
from lowcomm_jax.engine import Engine
from lowcomm_jax.mesh.regions import AXES, REGION, axis_names

PyTree = Any
LARGE = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A large array that every device along some axes holds whole.

    Attributes:
      what: its type and shape on one device, as text.
      axes: mesh axes along which it is the same.
      source: the argument's path, or the line of Python that asks for it.
    """

    what: str
    nbytes: int
    axes: tuple[str, ...]
    source: str


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """One program on one device.

    Attributes:
      memory: `arguments`, `outputs`, `temporaries`, `aliased` (outputs in the place of arguments).
      needs: bytes that a device must have while it runs: the resident state, arguments brought from
        the host, temporaries, and outputs in places of their own.
      bounds: lower bounds of its time: `compute` (products at the peak rate) and `memory`
        (arguments and outputs once, at the memory's rate).
      work: what its kernels do, by kind (`kernels.KINDS`), and seconds that they are expected to
        take; a loop whose trips are traced counts one.
      collectives: all of them.
      replicated: arrays of at least 64 MiB that are whole along an axis.
      compile_seconds: on this machine.
    """

    name: str
    memory: dict[str, int]
    needs: int
    bounds: dict[str, float]
    work: dict[str, KernelWork]
    collectives: tuple[Collective, ...]
    replicated: tuple[Replicated, ...]
    compile_seconds: float

    @property
    def flops(self) -> float:
        """Of products and attention."""
        return sum(one.flops for one in self.work.values())

    @property
    def exposed(self) -> float:
        """Seconds that a device waits for others of its region (`timeline`)."""
        return sum(one.waited for one in self.collectives)

    @property
    def seconds(self) -> float:
        """Expected time, traffic between regions apart: kernels at what they reach, and waiting."""
        return sum(one.seconds for one in self.work.values()) + self.exposed

    @property
    def inside(self) -> dict[str, dict[str, Any]]:
        """Axes inside a region -> `collective_table`'s figures of all collectives over them."""
        return _summed([one for one in self.collectives if not one.crosses], _axes_of)

    @property
    def least_seconds(self) -> float:
        """Lower bound of its time, traffic between regions apart."""
        return max(self.bounds.values()) + self.exposed

    @property
    def crossing_bytes(self) -> int:
        """Payload bytes that one device sends to other regions, routed microbatches apart.

        Raises:
          MixedGroupsError: see `collectives.across_regions`.
        """
        payload = [one for one in self.collectives if not (one.is_control or one.is_routed)]
        return sum(one.total - one.scalar_bytes for one in across_regions(payload))

    @property
    def control_bytes(self) -> int:
        """Bytes of norms, weights and counts that one device sends to other regions."""
        crossing = [one for one in self.collectives if one.crosses and not one.is_routed]
        return sum(one.total if one.is_control else one.scalar_bytes for one in crossing)

    @property
    def routed_bytes(self) -> int:
        """Bytes of microbatches, and of their gradients, that one device sends to next stages.

        Those of the calls in which the next stage is its own region's are counted, too.
        """
        return sum(one.total for one in self.collectives if one.is_routed)


@dataclasses.dataclass(frozen=True)
class AheadOfTime:
    """Needs of a period of an engine on a target.

    Attributes:
      mesh: sizes of the axes.
      programs: in the order in which a period calls them.
      resident: bytes a device of state that lies there between programs, one payload in flight
        included.
      stowed: bytes of state that `offload` keeps on the host.
      announced: bytes that the ledger books for a region when everyone sends the largest fragment.
      flops_used: arithmetic of the model's step on a device, without recomputation; None = unknown.
    """

    target: Target
    mesh: dict[str, int]
    programs: tuple[ProgramReport, ...]
    resident: int
    stowed: int
    announced: int
    flops_used: float | None = None

    @property
    def fits(self) -> bool:
        return all(program.needs <= self.room for program in self.programs)

    @property
    def room(self) -> int:
        """Bytes of a device that programs may use."""
        return self.target.accelerator.room

    @property
    def crossing_bytes(self) -> int:
        """Bytes that one region sends in the compiled programs; gradient methods: in a step.

        Raises:
          MixedGroupsError: see `collectives.across_regions`.
        """
        each = sum(program.crossing_bytes for program in self.programs)
        return each * self.devices_per_region

    @property
    def control_bytes(self) -> int:
        """Bytes of control values that one device sends to other regions in a round."""
        return sum(program.control_bytes for program in self.programs)

    @property
    def routed_bytes(self) -> int:
        """Of one device in an inner step (`ProgramReport.routed_bytes`)."""
        return self.programs[0].routed_bytes

    @property
    def devices_per_region(self) -> int:
        return math.prod(self.mesh.values()) // self.mesh[REGION]

    @property
    def mfu_bound(self) -> float | None:
        """Model FLOPs utilisation of the inner step if nothing but the lower bounds took time."""
        inner = self.programs[0]
        peak = inner.least_seconds * self.target.accelerator.flops
        return self.flops_used / peak if self.flops_used and peak else None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "target": str(self.target),
            "mesh": self.mesh,
            "room": self.room,
            "resident": self.resident,
            "stowed": self.stowed,
            "announced": self.announced,
            "crossing": self.crossing_bytes,
            "control": self.control_bytes,
            "routed": self.routed_bytes,
            "fits": self.fits,
            "mfu_bound": self.mfu_bound,
            "programs": {program.name: _program_json(program) for program in self.programs},
        }


def ahead_of_time(
    engine: Engine,
    params: PyTree,
    batch: PyTree,
    target: Target | str,
    *,
    flops_used: float | None = None,
    progress: Progress | None = None,
) -> AheadOfTime:
    """Compile an engine's programs for a target that need not be there, and read them.

    Args:
      engine: whose mesh is `target.mesh(...)`.
      params: shapes (or values) of the parameters, the user's tree.
      batch: shapes (or values) of one region's batch of a step, leaves `[b, ...]`.
      target: see `Target.parse`.
      flops_used: see `AheadOfTime`; for the bound of MFU.
      progress: told before every program: its name, how many are compiled, and about how many
        there are.

    Raises:
      ValueError: the engine's mesh is of other devices.
    """
    target = Target.parse(target) if isinstance(target, str) else target
    mesh = engine.regions.mesh
    kind = mesh.devices.flat[0].device_kind
    if mesh.size != target.size or kind != target.devices[0].device_kind:
        raise ValueError(
            f"the engine's mesh has {mesh.size} devices ({kind}), the target {target} has "
            f"{target.size} ({target.devices[0].device_kind}): make the engine with "
            "mesh=target.mesh(...)"
        )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    found = compile_engine(engine, *shapes, progress=progress)
    reports = [_read(program, target, mesh.shape, found.resident) for program in found.programs]
    return AheadOfTime(
        target,
        dict(mesh.shape),
        tuple(reports),
        found.resident,
        found.stowed,
        found.announced,
        flops_used,
    )


def _read(
    found: CompiledProgram, target: Target, shape: Mapping[str, int], resident: int
) -> ProgramReport:
    """What a compiled program needs of one device: `resident` bytes stay there between programs."""
    program, device = parse(found.compiled.as_text()), target.accelerator
    partitions = target.size if target.is_gpu else target.devices_per_slice
    work, moved = _played(program, collectives(program, tuple(shape.values()), partitions), target)
    memory = found.memory
    flops = sum(one.flops for one in work.values())
    return ProgramReport(
        name=found.name,
        memory=memory,
        needs=found.needs(resident),
        bounds={
            "compute": flops / device.flops,
            "memory": (memory["arguments"] + memory["outputs"]) / device.memory_rate,
        },
        work=work,
        collectives=tuple(moved),
        replicated=tuple(_replicated(found, moved, shape)),
        compile_seconds=found.seconds,
    )


def _played(
    program: Program, moved: list[Collective], target: Target
) -> tuple[dict[str, KernelWork], list[Collective]]:
    """Work of a program's kernels, and its collectives with their rates and times."""
    rates = [None if one.crosses else target.rate(one.groups, one.in_ring) for one in moved]
    places = [(one.computation, one.name) for one in moved]
    seconds = (rate and one.nbytes / rate for one, rate in zip(moved, rates))
    played = play(program, dict(zip(places, seconds)), target.accelerator)
    timed = [
        dataclasses.replace(one, rate=rate, waited=played.waited[at], beside=played.beside[at])
        for one, rate, at in zip(moved, rates, places)
    ]
    return played.work, timed


def _replicated(
    found: CompiledProgram, moved: list[Collective], shape: Mapping[str, int]
) -> list[Replicated]:
    """Arguments that lie whole along an axis, and results of collectives that do.

    All other arrays that are whole on several devices were computed from these.
    """
    large = []
    inside = [axis for axis in AXES[1:] if shape[axis] > 1]
    given = jax.tree_util.tree_leaves_with_path(found.compiled.in_avals)
    lies = jax.tree.structure(found.compiled.in_avals).flatten_up_to(found.compiled.input_shardings)
    for (path, x), sharding in zip(given, lies):
        if sharding is None:  # the program does not read it
            continue
        used = {axis for entry in sharding.spec for axis in axis_names(entry)}
        idle = tuple(axis for axis in inside if axis not in used)
        nbytes = math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
        if idle and nbytes >= LARGE:
            name = jax.tree_util.keystr(path)
            large.append(Replicated(f"{x.dtype}{list(x.shape)}", nbytes, idle, f"argument {name}"))
    for one in moved:
        if one.crosses or one.kind not in ("all-gather", "all-reduce"):
            continue
        times = one.group if one.kind == "all-gather" else 1
        for array in one.arrays:
            if array.nbytes * times >= LARGE:
                what = f"{one.kind} of {array}"
                large.append(Replicated(what, array.nbytes * times, one.axes, one.source))
    return sorted(large, key=lambda one: -one.nbytes)


def _program_json(program: ProgramReport) -> dict[str, Any]:
    return {
        "memory": program.memory,
        "needs": program.needs,
        "flops": program.flops,
        "bounds": program.bounds,
        "seconds": program.seconds,
        "exposed": program.exposed,
        "work": {kind: dataclasses.asdict(one) for kind, one in program.work.items()},
        "collectives": collective_table(program.collectives),
        "replicated": [dataclasses.asdict(one) for one in program.replicated],
    }


def collective_table(found: Sequence[Collective]) -> dict[str, dict[str, Any]]:
    """`kind over axes` -> how many there are, how often they run, bytes, rate, times.

    `rate` is the slowest, None between regions; `waited` and `beside` are those of `Collective`.
    """
    return _summed(found, lambda one: f"{one.kind} over {_axes_of(one)}")


def _axes_of(one: Collective) -> str:
    return "+".join(one.axes)


def _summed(
    found: Sequence[Collective], name: Callable[[Collective], str]
) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for one in found:
        empty = {"count": 0, "runs": 0, "bytes": 0, "rate": one.rate, "waited": 0.0, "beside": 0.0}
        row = table.setdefault(name(one), empty)
        row["count"] += 1
        row["runs"] += one.times
        row["bytes"] += one.total
        row["rate"] = one.rate and min(one.rate, row["rate"])
        row["waited"] += one.waited
        row["beside"] += one.beside
    return dict(sorted(table.items()))
