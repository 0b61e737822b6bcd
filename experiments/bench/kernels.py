"""Time of a traced program by kind of kernel: products, attention, others, exchange.

`traced` runs a function under JAX's profiler and gives its kernels. `kinds` tells from the text of
the compiled program what each of them does, and `traffic` what the others read and write.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from lowcomm_jax.aot import collectives
from lowcomm_jax.aot.hlo import Instruction, Program

PRODUCTS, ATTENTION, OTHERS, EXCHANGE = KINDS = "products", "attention", "others", "exchange"
_COLLECTIVES = "nccl", *(kind.replace("-", "[-_]?") for kind in collectives.KINDS)
# Kernels of libraries, where the profile does not name the instruction.
_BY_NAME = (
    # Their time is that of what is in them.
    (None, re.compile(r"^(while|conditional|call)[.\d]*$")),
    (ATTENTION, re.compile("sdpa|fmha|flash|cudnn::fusion", re.IGNORECASE)),
    (EXCHANGE, re.compile("|".join(_COLLECTIVES), re.IGNORECASE)),
    (PRODUCTS, re.compile("gemm|nvjet|cublas|cutlass|xmma|splitk", re.IGNORECASE)),
)
_IN_LIBRARY = ((ATTENTION, ("cudnn$fmha", "splash")), (PRODUCTS, ("cublas", "gemm")))
_PRODUCTS = ("dot", "convolution", "ragged-dot")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"}
_FREE |= {"while", "conditional", "call", "async", "async-update", "partition-id", "replica-id"}
_INLINED = ("fusion", "reduce", "scatter", "sort", "map", "reduce-window", "select-and-scatter")
_INLINED += ("all-reduce", "reduce-scatter")


class Kernel(NamedTuple):
    """One kernel of a trace.

    Attributes:
      name: the profile's name of it.
      operation: name of the instruction of the compiled program; "" = not told.
      start, seconds: when it began, by the profile's clock, and how long it ran.
      device: name of the device's part of the profile.
    """

    name: str
    operation: str
    start: float
    seconds: float
    device: str


def traced(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels that ran on devices, from a call of `run` to when its arrays are ready."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return kernels_of(ProfileData.from_file(str(file)))


def kernels_of(profile: ProfileData) -> list[Kernel]:
    """Kernels of all GPUs; where there are none, the operations of the processor."""
    gpus = [plane for plane in profile.planes if plane.name.startswith("/device:GPU:")]
    if gpus:
        # Other lines sum up what those of streams hold.
        lines = [(p, line) for p in gpus for line in p.lines if line.name.startswith("Stream")]
    else:
        hosts = [plane for plane in profile.planes if plane.name.startswith("/host:CPU")]
        lines = [(plane, line) for plane in hosts for line in plane.lines]
    found = []
    for plane, line in lines:
        for event in line.events:
            operation = str(dict(event.stats).get("hlo_op", ""))
            if gpus or operation:
                times = event.start_ns / 1e9, event.duration_ns / 1e9
                found.append(Kernel(event.name, operation, *times, plane.name))
    return found


def kinds(program: Program) -> dict[str, str]:
    """Kind of every instruction that runs as a kernel, by its name without punctuation."""
    return {_plain(one.name): _kind(program, one) for one, _, _ in _kernels(program)}


def by_kind(kernels: Iterable[Kernel], known: Mapping[str, str]) -> dict[str, list[Kernel]]:
    """The kernels of each kind of `KINDS`.

    Args:
      known: `kinds` of their program. Kernels that it does not have are judged by their own names.
    """
    found: dict[str, list[Kernel]] = {kind: [] for kind in KINDS}
    for kernel in kernels:
        kind = _traced_kind(kernel, known)
        if kind is not None:
            found[kind].append(kernel)
    return found


def _traced_kind(kernel: Kernel, known: Mapping[str, str]) -> str | None:
    for name in (kernel.operation, kernel.name):
        if _plain(name) in known:
            return known[_plain(name)]
    return next((kind for kind, words in _BY_NAME if words.search(kernel.name)), OTHERS)


def longest(kernels: Iterable[Kernel], count: int) -> dict[str, float]:
    """Seconds in all of those operations that take most time."""
    total: Counter[str] = Counter()
    for kernel in kernels:
        total[kernel.operation or kernel.name] += kernel.seconds
    return dict(total.most_common(count))


def busy_seconds(kernels: Iterable[Kernel]) -> float:
    """Time at which at least one of the kernels ran."""
    return sum(end - start for start, end in _united(kernels))


def beside_seconds(kernels: Sequence[Kernel], others: Sequence[Kernel]) -> float:
    """Time at which one of the kernels and one of the others ran on the same device."""
    total = 0.0
    for device in {kernel.device for kernel in kernels}:
        ours, theirs = ([k for k in ks if k.device == device] for ks in (kernels, others))
        total += busy_seconds(ours) + busy_seconds(theirs) - busy_seconds([*ours, *theirs])
    return total


def _united(kernels: Iterable[Kernel]) -> Iterator[tuple[float, float]]:
    """(start, end) of the times at which a kernel ran, none of which meet."""
    now: tuple[float, float] | None = None
    for start, end in sorted((k.start, k.start + k.seconds) for k in kernels):
        if now is not None and start <= now[1]:
            now = now[0], max(now[1], end)
        else:
            if now is not None:
                yield now
            now = start, end
    if now is not None:
        yield now


# -- the compiled program ----------------------------------------------------------------------


def traffic(program: Program) -> tuple[float, float]:
    """(bytes, launches) of the kernels of the kind `others` in one call.

    A kernel reads each operand once, except one that it only slices, and writes its results. An
    update in place writes the part that it updates.
    """
    rows = [row for row in _kernels(program) if _kind(program, row[0]) == OTHERS]
    moved = (n * (_read(program, one, where) + _written(program, one)) for one, where, n in rows)
    return sum(moved), sum(n for _, _, n in rows)


def _kernels(program: Program) -> Iterator[tuple[Instruction, str, float]]:
    """`Program.instructions`, of those that run as kernels of their own."""
    inlined = {
        name
        for ones in program.computations.values()
        for one in ones
        if one.base in _INLINED
        for name in one.called.values()
    }
    for one, computation, times in program.instructions():
        ends = one.opcode.endswith("-done")
        if computation not in inlined and one.base not in _FREE and not ends:
            yield one, computation, times


def _kind(program: Program, one: Instruction) -> str:
    if one.base in collectives.KINDS:
        return EXCHANGE
    if any(x.opcode in _PRODUCTS for x in (one, *_body(program, one))):
        return PRODUCTS
    if one.opcode == "custom-call":
        target = (one.attribute(r'custom_call_target="([^"]*)"') or "") + one.op_name
        for kind, words in _IN_LIBRARY:
            if any(word in target for word in words):
                return kind
    return OTHERS


def _body(program: Program, one: Instruction) -> tuple[Instruction, ...]:
    """Instructions of a fusion; none of any other instruction."""
    return program.computations.get(one.called.get("calls", ""), ())


def _read(program: Program, one: Instruction, computation: str) -> float:
    body, known = _body(program, one), program.named(computation)
    inside = {int(x.attributes.split(")")[0]): x.name for x in body if x.opcode == "parameter"}
    total = 0
    for position, operand in enumerate(one.operands):
        whole = known[operand].nbytes if operand in known else 0
        users = [x for x in body if inside.get(position) in x.operands]
        if users and all(x.opcode in ("dynamic-slice", "gather", "slice") for x in users):
            whole = min(whole, sum(x.nbytes for x in users))
        elif users and all(_updates(x, inside[position]) for x in users):
            whole = 0
        total += whole
    return total


def _updates(one: Instruction, name: str) -> bool:
    return one.opcode == "dynamic-update-slice" and one.operands[0] == name


def _written(program: Program, one: Instruction) -> float:
    inner = {x.name: x for x in _body(program, one)}
    root = next((x for x in inner.values() if x.is_root), None)
    if root is None:
        return one.nbytes
    total = 0
    for x in [root] if root.opcode != "tuple" else [inner[name] for name in root.operands]:
        while x.opcode in ("bitcast", "copy") and x.operands and x.operands[0] in inner:
            x = inner[x.operands[0]]
        total += inner[x.operands[1]].nbytes if x.opcode == "dynamic-update-slice" else x.nbytes
    return total


def _plain(name: str) -> str:
    """A name as XLA gives it to a kernel."""
    return re.sub(r"[.\-]", "_", name)
