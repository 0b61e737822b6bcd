"""Time of a traced program by kind of kernel: products, attention, others, exchange.

`traced` runs a function under JAX's profiler and gives its kernels. `kinds` tells from the text of
the compiled program what each of them does.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from lowcomm_jax.aot import collectives, kernels
from lowcomm_jax.aot.hlo import Program

KINDS = PRODUCT, ATTENTION, OTHER, EXCHANGE = *kernels.KINDS, "exchange"
_COLLECTIVES = "nccl", *(kind.replace("-", "[-_]?") for kind in collectives.KINDS)
# Kernels of libraries, where the profile does not name the instruction.
_BY_NAME = (
    # Their time is that of what is in them.
    (None, re.compile(r"^(while|conditional|call)[.\d]*$")),
    (ATTENTION, re.compile("sdpa|fmha|flash|cudnn::fusion", re.IGNORECASE)),
    (EXCHANGE, re.compile("|".join(_COLLECTIVES), re.IGNORECASE)),
    (PRODUCT, re.compile("gemm|nvjet|cublas|cutlass|xmma|splitk", re.IGNORECASE)),
)
_INLINED = ("fusion", "reduce", "scatter", "sort", "map", "reduce-window", "select-and-scatter")
_INLINED += ("all-reduce", "reduce-scatter")


class Traced(NamedTuple):
    """One run of a kernel.

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


def traced(run: Callable[[], Any]) -> list[Traced]:
    """The kernels that ran on devices, from a call of `run` to when its arrays are ready."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return kernels_of(ProfileData.from_file(str(file)))


def kernels_of(profile: ProfileData) -> list[Traced]:
    """Kernels of all GPUs; where there are none, the operations of the processor."""
    gpus = [plane for plane in profile.planes if plane.name.startswith("/device:GPU:")]
    if gpus:
        # Other lines sum up what those of streams hold.
        lines = [(p, line) for p in gpus for line in p.lines if line.name.startswith("Stream")]
    else:
        hosts = [plane for plane in profile.planes if plane.name.startswith("/host:CPU")]
        lines = [(plane, line) for plane in hosts for line in plane.lines]
    found = []
    with warnings.catch_warnings():
        # Python 3.12 says that jaxlib's type of statistics names no module.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane, line in lines:
            for event in line.events:
                operation = str(dict(event.stats).get("hlo_op", ""))
                if gpus or operation:
                    times = event.start_ns / 1e9, event.duration_ns / 1e9
                    found.append(Traced(event.name, operation, *times, plane.name))
    return found


def kinds(program: Program) -> dict[str, str]:
    """Kind of every instruction that runs as a kernel, by its name without punctuation."""
    inlined = {
        name
        for ones in program.computations.values()
        for one in ones
        if one.base in _INLINED
        for name in one.called.values()
    }
    found = {}
    for one, computation, _ in program.instructions():
        if computation in inlined:
            continue
        if one.base in collectives.KINDS:
            found[_plain(one.name)] = EXCHANGE
        elif (kernel := kernels.kernel_of(program, one, computation)) is not None:
            found[_plain(one.name)] = kernel.kind
    return found


def by_kind(seen: Iterable[Traced], known: Mapping[str, str]) -> dict[str, list[Traced]]:
    """The kernels of each kind of `KINDS`.

    Args:
      known: `kinds` of their program. Kernels that it does not have are judged by their own names.
    """
    found: dict[str, list[Traced]] = {kind: [] for kind in KINDS}
    for one in seen:
        kind = _kind(one, known)
        if kind is not None:
            found[kind].append(one)
    return found


def _kind(one: Traced, known: Mapping[str, str]) -> str | None:
    for name in (one.operation, one.name):
        if _plain(name) in known:
            return known[_plain(name)]
    return next((kind for kind, words in _BY_NAME if words.search(one.name)), OTHER)


def longest(seen: Iterable[Traced], count: int) -> dict[str, float]:
    """Seconds in all of those operations that take most time."""
    total: Counter[str] = Counter()
    for one in seen:
        total[one.operation or one.name] += one.seconds
    return dict(total.most_common(count))


def busy_seconds(seen: Iterable[Traced]) -> float:
    """Time at which at least one of them ran."""
    return sum(end - start for start, end in _united(seen))


def beside_seconds(seen: Sequence[Traced], others: Sequence[Traced]) -> float:
    """Time at which one of them and one of the others ran on the same device."""
    total = 0.0
    for device in {one.device for one in seen}:
        ours, theirs = ([k for k in ks if k.device == device] for ks in (seen, others))
        total += busy_seconds(ours) + busy_seconds(theirs) - busy_seconds([*ours, *theirs])
    return total


def _united(seen: Iterable[Traced]) -> Iterator[tuple[float, float]]:
    """(start, end) of the times at which a kernel ran, none of which meet."""
    now: tuple[float, float] | None = None
    for start, end in sorted((k.start, k.start + k.seconds) for k in seen):
        if now is not None and start <= now[1]:
            now = now[0], max(now[1], end)
        else:
            if now is not None:
                yield now
            now = start, end
    if now is not None:
        yield now


def _plain(name: str) -> str:
    """A name as XLA gives it to a kernel."""
    return re.sub(r"[.\-]", "_", name)
