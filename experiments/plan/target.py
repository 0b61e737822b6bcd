r"""Compile a training config for accelerators that are not there, and print what its programs need.

    python -m experiments plan --target=h100:2x8 --config=configs/diloco.py \
        --config.model.preset=diloco_150m --config.model.vocab_size=32000 [--json=plan.json]

Per program: memory needed of a device and memory it has, arithmetic and a lower bound of its time,
collectives (kind, axis, bytes, how long the device waits), and large arrays that lie whole on
several devices. Of the inner step: what its kernels move, and where its expected time goes. Nothing
runs, and the corpus is read only where the vocabulary size depends on it. Needs the extra `aot`.
docs/accelerators.md explains how to read the output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.cli import Flags, RefusedError, config_asked_for, made_or_refused
from experiments.progress import Work, plain_console, right, say

if TYPE_CHECKING:
    from experiments.train.job import Job
    from lowcomm_jax.aot.report import AheadOfTime, ProgramReport


def main(argv: Sequence[str]) -> int:
    """Report what the command line asks for; returns the exit code."""
    # Before JAX is imported: without a driver it offers absent GPUs on the CPU platform only.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    options = Flags()
    options.text(
        "target", None, "accelerators, slices x devices of each: h100:2x8, v5e:4x4x2slices, ..."
    )
    options.text("json", None, "file to write the report to")
    values = options.values
    config, _, overrides = config_asked_for("plan --target", argv, options, __doc__, _descriptions)
    from experiments.train.resolve import fit_warm_up, refuse_unreadable
    from lowcomm_jax.aot.programs import TooLargeError

    refuse_unreadable(config)
    fit_warm_up(config, overrides)
    try:
        job, report = compiled(config, values.target)
    except TooLargeError as error:
        console = plain_console()
        console.print(Text.assemble(("does not fit", "red"), f": {error}"), soft_wrap=True)
        say(console, *advice(None))
        return 1
    show(job, report, plain_console())
    if values.json:
        written = report.as_json() | {"mfu_parts": mfu_parts(job, report)}
        Path(values.json).write_text(json.dumps(written, indent=1) + "\n")
    return 0 if report.fits else 1


def _descriptions(config: Any) -> dict[str, str]:
    from experiments.config import plain
    from experiments.train import fields

    return fields.descriptions(plain(config.method), plain(config.model))


def compiled(config, name: str) -> tuple[Job, AheadOfTime]:
    """Compile the programs of a training config for a target.

    Raises:
      RefusedError: the config or the target is wrong, or they do not fit together.
    """
    import jax
    import numpy as np

    from experiments.train.job import make_engine, make_model
    from experiments.train.model import with_vocabulary
    from experiments.train.resolve import resolve
    from lowcomm_jax.aot import Target, ahead_of_time
    from lowcomm_jax.data import load
    from lowcomm_jax.models.protocol import abstract_params, flops_per_token

    target = made_or_refused(lambda: Target.parse(name), "plan")
    try:
        assert target.devices
    except RuntimeError as error:
        raise RefusedError([str(error)], "plan") from error
    job = resolve(config, "plan", target)
    described = job.model
    if not job.vocab_settled:
        with Work("data") as work:
            tokenizer = load(job.data, progress=work.at)[2]
        described = with_vocabulary(described, tokenizer.vocab_size)
    model = make_model(job, described)
    engine = made_or_refused(lambda: make_engine(job, model).plain, "plan")
    length = job.data.seq_len
    batch = {
        "tokens": jax.ShapeDtypeStruct((job.batch, length + 1), np.int32),
        "mask": jax.ShapeDtypeStruct((job.batch, length), np.float32),
    }
    devices = job.mesh.size // job.mesh.shape["region"]
    replicas = job.regions // job.mesh.shape["region"]
    each = flops_per_token(model, length)
    used = None if each is None else each * job.batch * length * replicas / devices
    params = abstract_params(model)
    with Work(f"{target}: programs compiled") as work:
        report = ahead_of_time(engine, params, batch, target, flops_used=used, progress=work.at)
    return job, report


def show(job: Job, report: AheadOfTime, console: Console) -> None:
    """Print the report."""
    device, mesh = report.target.accelerator, report.mesh
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "1 device"
    what = (
        f": {job.regions} regions on {sizes}; "
        f"{job.batch} sequences of {job.data.seq_len} tokens a region and step"
    )
    console.print(Text.assemble((str(report.target), "bold"), what))
    verdict = ("fits", "green") if report.fits else ("does not fit", "red")
    room = (
        f": {device.name} has {_gb(device.memory_bytes)}, of which {_gb(report.room)} are "
        f"for programs; between programs {_gb(report.resident)} of state lie there"
        + (f", and {_gb(report.stowed)} on the host" if report.stowed else "")
    )
    console.print(Text.assemble(verdict, room))
    columns = ("program", *right(("needs", "of it temporary", "TFLOP", "at least")), "bound by")
    table = Table(*columns, box=box.SIMPLE, title="programs, one device", title_justify="left")
    for program in report.programs:
        over = program.needs - report.room
        needs = _gb(program.needs) + (f" ({_gb(over)} too much)" if over > 0 else "")
        table.add_row(
            program.name,
            needs,
            _gb(program.memory["temporaries"]),
            f"{program.flops / 1e12:.3g}",
            _ms(program.least_seconds),
            max(program.bounds, key=program.bounds.get),
        )
    console.print(table)
    if report.mfu_bound is not None:
        parts = [f"{share:.0%} {what}" for what, share in mfu_parts(job, report).items()]
        say(console, f"MFU of the inner step at most {report.mfu_bound:.0%} = {' x '.join(parts)}")
    _show_step(report, console)
    _show_crossing(report, console)
    _show_collectives(report, console)
    for program in report.programs:
        for one in program.replicated[:5]:
            axes = "+".join(one.axes)
            say(
                console,
                f"{program.name}: {one.what}, {_gb(one.nbytes)}, whole along {axes} ({one.source})",
            )
    for line in advice(report):
        console.print(Text.assemble(("to do", "yellow"), f" {line}"))


def mfu_parts(job: Job, report: AheadOfTime) -> dict[str, float]:
    """The bound of MFU as a product: what a share is of -> the share; {} = it is unknown."""
    from lowcomm_jax.mesh.stages import bubble

    if report.mfu_bound is None:
        return {}
    step, stages = report.programs[0], report.mesh["stage"]
    busy = 1 - bubble(stages, job.microbatches) if stages > 1 else 1.0
    parts = {"of the time computing": step.bounds["compute"] / step.least_seconds}
    if stages > 1:
        parts["of the pipeline's ticks busy"] = busy
    useful = report.flops_used / step.flops / busy
    return parts | {"of the arithmetic useful": useful}


def _show_step(report: AheadOfTime, console: Console) -> None:
    """Where the expected time of the inner step goes."""
    from lowcomm_jax.aot.kernels import ATTENTION, OTHER, OTHERS_REACH, PRODUCT, PRODUCTS_REACH

    step = report.programs[0]
    used = f" ({report.flops_used / 1e12:.3g} of both useful)" if report.flops_used else ""
    parts = [
        ("products", f"{step.work[PRODUCT].flops / 1e12:.3g} TFLOP", step.work[PRODUCT].seconds),
        (
            "attention",
            f"{step.work[ATTENTION].flops / 1e12:.3g} TFLOP{used}",
            step.work[ATTENTION].seconds,
        ),
        (
            "other kernels",
            f"{_gb(step.work[OTHER].nbytes)} in {step.work[OTHER].launches} launches",
            step.work[OTHER].seconds,
        ),
    ]
    for axes, row in step.inside.items():
        rate = f"{_mb(row['bytes'])} at {row['rate'] / 1e9:g} GB/s"
        parts.append((f"waiting, {axes}", rate, row["waited"]))
    moved = sum(work.nbytes for work in step.work.values())
    parts.append(("all", f"{_gb(moved)} read and written by kernels", step.seconds))
    table = Table(
        step.name,
        "what",
        *right(("expected", "share")),
        box=box.SIMPLE,
        title="expected time, one device",
        title_justify="left",
    )
    for name, what, seconds in parts:
        table.add_row(name, what, _ms(seconds), f"{seconds / step.seconds:.1%}")
    console.print(table)
    say(
        console,
        f"products and attention at {PRODUCTS_REACH:.0%} of the peak rate, other kernels at "
        f"{OTHERS_REACH:.0%} of the memory's, as measured on an H100; one link moves collectives "
        "in order",
    )


def _show_crossing(report: AheadOfTime, console: Console) -> None:
    more = report.crossing_bytes - report.announced
    console.print(
        f"between regions: {_mb(report.crossing_bytes)} a region and synchronisation in the "
        f"programs; the ledger announces {_mb(report.announced)}"
        + (f" ({more} bytes of padding)" if more else "")
        + f"; control values {report.control_bytes} bytes a device"
    )
    if report.routed_bytes:
        console.print(
            f"random routing: {_mb(report.routed_bytes)} of microbatches a device and inner step "
            "go to the next stage, most of them in other regions"
        )


def _show_collectives(report: AheadOfTime, console: Console) -> None:
    from lowcomm_jax.aot.report import collective_table

    columns = ("program", "what", *right(("runs", "bytes sent", "waited for", "beside kernels")))
    table = Table(*columns, box=box.SIMPLE, title="collectives, one device", title_justify="left")
    for program in report.programs:
        for what, row in collective_table(program.collectives).items():
            waited = "-" if row["rate"] is None else _ms(row["waited"])
            figures = f"{row['runs']:g}", _mb(row["bytes"]), waited, _ms(row["beside"])
            table.add_row(program.name, what, *figures)
    console.print(table)


def advice(report: AheadOfTime | None) -> list[str]:
    """Changes that make programs fit; a report of None = the compiler refused a program."""
    less = "--config.model.remat=full keeps less; --config.accumulate=2 halves the batch"
    more = "more devices a region: a larger --config.mesh.fsdp or tensor, or stages"
    host = "--config.offload=True keeps anchor, momentum and residuals on the host"
    if report is None:
        return [less, more, host]
    if report.fits:
        return []
    worst: ProgramReport = max(report.programs, key=lambda program: program.needs)
    found = [f"{worst.name} needs {_gb(worst.needs - report.room)} more than a device has:"]
    temporary = worst.memory["temporaries"] > worst.needs / 2 and worst is report.programs[0]
    return [*found, *([less, more] if temporary else [more]), *([] if report.stowed else [host])]


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-7 else "0 ms"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e5 else f"{nbytes:.0f} B"
