"""What `bench gpu` measures, and how: a `Case` of training, and a row of figures of each stage.

`Bench.items` names the parts of a stage, each with what measures it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import lowcomm_jax as lc
from experiments.bench import codec, traces
from experiments.bench.main import NotHereError, Row
from experiments.bench.work import (
    NEVER,
    held_bytes,
    inner_arguments,
    interleave,
    median,
    one_device_engine,
    random_batches,
)
from lowcomm_jax.aot.arithmetic import matrix_flops
from lowcomm_jax.aot.hlo import Program, parse
from lowcomm_jax.aot.kernels import OTHER
from lowcomm_jax.aot.targets import ACCELERATORS, accelerator_of
from lowcomm_jax.aot.timeline import KernelWork, play
from lowcomm_jax.compat import is_gpu
from lowcomm_jax.models import build, preset

STEPS = 4  # of one timed call
LONGEST = 8  # kernels of a kind that the file names
RATED = ("encode", "decode", "copy")
SMI = "clocks.sm clocks.max.sm clocks.mem power.draw power.limit temperature.gpu driver_version"
Settings = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batch a region, and regions on the card.

    Attributes:
      changes: fields of `TransformerConfig`.
    """

    preset: str
    batch: int
    length: int
    regions: int = 1
    changes: Settings = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the tokens of a step."""
        return self.regions, self.batch, self.length + 1

    def but(self, **changes: Any) -> Case:
        """The same with other fields of the model."""
        return dataclasses.replace(self, changes=tuple({**dict(self.changes), **changes}.items()))


@dataclasses.dataclass(frozen=True)
class Lever:
    """One choice: fields of the case, fields of the model, or options of XLA.

    Attributes:
      small: of the case with the smallest batch, instead of the first one.
    """

    name: str
    case: Settings = ()
    model: Settings = ()
    options: Settings = ()
    small: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured on one kind of machine; the first case is the one that levers change."""

    speed: tuple[Case, ...]
    regions: tuple[Case, ...]
    levers: tuple[Lever, ...]
    codecs: tuple[str, ...]
    codec_size: int
    exchange: Case


class Subject:
    """A case that is ready to be compiled; it holds no arrays."""

    def __init__(self, case: Case):
        self.case, self.device = case, jax.local_devices()[0]
        changes = dict(case.changes)
        if self.device.platform != "cpu":
            changes["compute_dtype"] = "bfloat16"
        self.model = build(preset(case.preset, **changes), self.device)
        self.engine = one_device_engine(
            self.model,
            lc.methods.diloco(NEVER),
            case.regions,
            stacked=self.model.stacked,
            block=STEPS,  # so that `program` is the one that `Engine.run` has compiled
        )
        self.init = jax.jit(self.model.init)
        self.batches = random_batches(self.model, STEPS, case.shape)
        self._compiled: dict[Settings, Any] = {}

    @property
    def tokens(self) -> int:
        """Of one step, over all regions."""
        return self.case.regions * self.case.batch * self.case.length

    def state(self) -> Any:
        return self.engine.init(self.init(jax.random.key(0)))

    def program(self, state: Any, options: Settings = ()) -> tuple[Any, list[Any]]:
        """The compiled program, with these options of XLA beside its own, and its arguments."""
        given = inner_arguments(self.engine, state, self.batches)
        if options not in self._compiled:
            program = self.engine.sync_loop(state).programs.inner_program
            lowered = program.lower(*given, single=False)
            self._compiled[options] = lowered.compile(dict(options) or None)
        return self._compiled[options], given


def _calls(compiled: Any, given: list[Any]) -> Callable[[], Any]:
    """Calls a program on what it returned before."""

    def call():
        given[0], _ = compiled(*given)
        return given[0]

    return call


class Bench:
    """Makes the rows of all stages."""

    def __init__(self, plan: Plan, repeats: int):
        self.plan, self.repeats = plan, repeats
        self.device = jax.local_devices()[0]
        self.facts = accelerator_of(self.device)
        self._subjects: dict[Case, Subject] = {}
        self._rows: dict[Any, Row] = {}

    def items(self, stage: str) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
        """(name, what measures it) of a stage's parts."""
        plan, part = self.plan, functools.partial
        if stage == "speed":
            yield from ((title(case), part(self.speed, case)) for case in plan.speed)
        elif stage == "regions":
            for case in plan.regions:
                for regions in (1, 4):
                    one = dataclasses.replace(case, regions=regions)
                    yield title(one), part(self.beside_one, one)
        elif stage == "profile":
            yield from ((title(case), part(self.profile, case)) for case in plan.speed)
        elif stage == "levers":
            for lever in (Lever("as it is"), Lever("small, as it is", small=True)):
                yield lever.name, part(self.lever, lever)
            yield from ((lever.name, part(self.lever, lever)) for lever in plan.levers)
        elif stage == "codecs":
            yield from ((name, part(self.codec, name)) for name in plan.codecs)
        elif stage == "attention":
            yield "gradients", self.attention
        else:
            yield "two regions", self.exchange

    def _subject(self, case: Case) -> Subject:
        if case not in self._subjects:
            self._subjects[case] = Subject(case)
        return self._subjects[case]

    def _needs_profiles(self) -> None:
        if not (is_gpu(self.device) or self.device.platform == "cpu"):
            raise NotHereError(f"profiles of {self.device.platform} are not read")

    def work(self, program: Program) -> dict[str, KernelWork]:
        """What kernels of each kind do in a step; seconds of an H100 where it is unknown."""
        return play(program, {}, self.facts or ACCELERATORS["h100"]).work

    def _peak(self) -> int:
        return (self.device.memory_stats() or {}).get("peak_bytes_in_use", 0)

    # -- stages ---------------------------------------------------------------------------------

    def speed(self, case: Case) -> list[Row]:
        """Through `Engine.run`, as a person trains."""
        if case in self._rows:
            return [self._rows[case]]
        subject, before = self._subject(case), self._peak()
        state = subject.state()

        def run():
            nonlocal state
            state, _ = subject.engine.run(state, subject.batches)
            return state.inner.step

        seconds = median(interleave({"run": run}, self.repeats)["run"]) / STEPS
        compiled, given = subject.program(state)
        held = held_bytes(state) - sum(x.nbytes for x in jax.tree.leaves(state.inner))
        call = _calls(compiled, given)
        call()
        busy = smi()  # while the card computes
        jax.block_until_ready(call())
        flops = matrix_flops(parse(compiled.as_text()))
        analysis = compiled.memory_analysis()
        asked = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
        used = subject.model.flops_per_token(case.length) * subject.tokens
        facts, peak = self.facts, self._peak()
        row = {
            **_of(case),
            "tokens_per_step": subject.tokens,
            "tokens_per_second": subject.tokens / seconds,
            "step_seconds": seconds,
            "bound_seconds": None if facts is None else flops / facts.flops,
            "mfu": None if facts is None else used / seconds / facts.flops,
            "memory_foretold": asked + held,
            # The device tells the most since the process began.
            "memory_used": peak if peak > before else None,
            "card": busy,
        }
        self._rows[case] = row
        return [row]

    def beside_one(self, case: Case) -> list[Row]:
        """`speed`, and as a share of one region's tokens a second at the same batch."""
        (row,) = self.speed(case)
        one = self._rows.get(dataclasses.replace(case, regions=1))  # None: it has failed
        of_one = one and row["tokens_per_second"] / one["tokens_per_second"]
        return [{**row, "of_one_region": of_one}]

    def profile(self, case: Case) -> list[Row]:
        """A row per kind of kernel; seconds are of one step."""
        self._needs_profiles()
        subject = self._subject(case)
        compiled, given = subject.program(subject.state())
        call = _calls(compiled, given)
        jax.block_until_ready(call())
        begun = time.perf_counter()
        jax.block_until_ready(call())
        step = (time.perf_counter() - begun) / STEPS
        seen = traces.traced(call)
        program = parse(compiled.as_text())
        work = self.work(program)
        rows = []
        for kind, some in traces.by_kind(seen, traces.kinds(program)).items():
            seconds, todo = sum(one.seconds for one in some) / STEPS, work.get(kind)
            of_peak = None
            if todo and seconds and self.facts:
                rate = self.facts.memory_rate if kind == OTHER else self.facts.flops
                of_peak = (todo.nbytes if kind == OTHER else todo.flops) / seconds / rate
            rows.append(
                {
                    **_of(case),
                    "step_seconds": step,
                    "busy_seconds": traces.busy_seconds(seen) / STEPS,
                    "kind": kind,
                    "seconds": seconds,
                    "foretold_seconds": todo and self.facts and todo.seconds,
                    "launches": len(some) / STEPS,
                    "flops": todo and todo.flops,
                    "bytes": todo and todo.nbytes,
                    "of_peak": of_peak,
                    "longest": traces.longest(some, LONGEST),
                }
            )
        return [row for row in rows if row["launches"]]

    def lever(self, lever: Lever) -> list[Row]:
        """The program by itself, beside the one as it is."""
        (base, *_), cases = self.plan.speed, self.plan.regions
        if lever.small:
            base = min(cases, key=lambda case: case.batch)
        case = dataclasses.replace(base, **dict(lever.case)).but(**dict(lever.model))
        subject = self._subject(case)
        begun = time.perf_counter()
        compiled, given = subject.program(subject.state(), lever.options)
        compiling = time.perf_counter() - begun
        call = _calls(compiled, given)
        seconds = median(interleave({"run": call}, self.repeats)["run"]) / STEPS
        program = parse(compiled.as_text())
        others = self.work(program)[OTHER]
        row = {
            **_of(case),
            "lever": lever.name,
            "changes": dict(lever.case + lever.model + lever.options),
            "step_seconds": seconds,
            "tokens_per_second": subject.tokens / seconds,
            "compile_seconds": compiling,
            "flops": matrix_flops(program),
            "other_bytes": others.nbytes,
            "other_launches": others.launches,
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
        if not (lever.case or lever.model or lever.options):
            self._rows["lever", base] = row
        as_it_is = self._rows.get(("lever", base))
        of = as_it_is and row["tokens_per_second"] / as_it_is["tokens_per_second"]
        return [{**row, "of_as_it_is": of}]

    def codec(self, name: str) -> list[Row]:
        """Rates count the fp32 values."""
        row = codec.measure(name, self.plan.codec_size, self.repeats)
        rates = {f"{k}_rate": 4 * self.plan.codec_size**2 / row[f"{k}_s"] for k in RATED}
        return [{**row, **rates}]

    def attention(self) -> list[Row]:
        """Relative difference of a gradient by the device's kernel to plain products."""
        case = dataclasses.replace(preset("diloco_150m", compute_dtype="bfloat16"), layers=2)
        kernel = build(case, self.device)
        if kernel.config.attention == "xla":
            raise NotHereError("this device has no kernel for attention")
        plain = build(dataclasses.replace(case, attention="xla"), self.device)
        params, key = jax.jit(plain.init)(jax.random.key(0)), jax.random.key(1)
        batch = {"tokens": jax.random.randint(key, (2, 513), 0, case.vocab_size)}
        one, two = (
            jax.jit(jax.grad(lambda p, m=m: m.loss_fn(p, batch, key)[0]))(params)
            for m in (kernel, plain)
        )
        apart = optax.tree.norm(jax.tree.map(jnp.subtract, one, two))
        error = float(apart / optax.tree.norm(two))
        return [{"kernel": kernel.config.attention, "gradient_error": error}]

    def exchange(self) -> list[Row]:
        """Streaming DiLoCo of two regions on two devices: what of its exchange steps hide."""
        devices = jax.local_devices()[:2]
        if len(devices) < 2:
            raise NotHereError("an exchange needs two devices, and here is one")
        self._needs_profiles()
        case = dataclasses.replace(self.plan.exchange, regions=2)
        model = self._subject(case).model
        engine = lc.Engine(
            model.loss_fn,
            optax.adamw(1e-4),
            lc.methods.streaming_diloco(2 * STEPS, 2, STEPS, 0.5),
            2,
            mesh=lc.make_mesh(2, devices=devices),
            stacked=model.stacked,
            concurrent_exchange=True,
        )
        state = engine.init(jax.jit(model.init)(jax.random.key(0)))
        period = random_batches(model, 2 * STEPS, case.shape)

        def run():
            nonlocal state
            state, _ = engine.run(state, period)
            return state.inner.step, state.anchor

        for _ in range(2):
            jax.block_until_ready(run())
        seen = traces.by_kind(traces.traced(run), {})
        moving = seen.pop(traces.EXCHANGE)
        work = [one for some in seen.values() for one in some]
        seconds = traces.busy_seconds(moving)
        hidden = traces.beside_seconds(moving, work)
        return [{**_of(case), "exchange_seconds": seconds, "beside_work_seconds": hidden}]


def _of(case: Case) -> Row:
    return {"model": case.preset, **{k: getattr(case, k) for k in ("batch", "length", "regions")}}


def title(case: Case) -> str:
    """The case in a few words."""
    regions = f", {case.regions} regions" if case.regions > 1 else ""
    return f"{case.preset}, {case.batch} x {case.length:,}{regions}"


def smi() -> Row:
    """Clocks, power and driver of the first card that this process sees; {} = nobody tells."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    fields = SMI.split()
    query = ["nvidia-smi", f"--id={card}", f"--query-gpu={','.join(fields)}"]
    try:
        said = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = said.stdout.strip().split(", ")
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}
