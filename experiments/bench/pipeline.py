"""Memory and speed of a gradient step in pipeline stages: GPipe's schedule and 1F1B.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 \\
        python -m experiments bench pipeline [--stages=4] [--microbatches=8,16,32] [--repeats=5]

Memory is what the compiler needs on a device beside arguments and results. Stages on virtual
devices share the CPU, so that their seconds are those of all arithmetic, idle ticks included. Idle
stages cost nothing here; with a device for each stage they cost the bubble, which the table shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from rich.console import Console
from rich.table import Table

import lowcomm_jax as lc
from experiments.bench.work import interleave, median, write_rows
from experiments.cli import Flags, flag_problems, refuse_any
from experiments.progress import right, tracked
from experiments.train.header import machine
from lowcomm_jax.models import Pipeline, TransformerConfig, build
from lowcomm_jax.planner.memory import memory_of

LAYERS, WIDTH, CONTEXT = 8, 128, 128
# The first is what the others are held against.
VARIANTS = (("gpipe", "none"), ("gpipe", "full"), ("1f1b", "none"), ("1f1b", "full"))


class PipelineRow(NamedTuple):
    """One schedule; `seconds` of a gradient step on 2 sequences a microbatch."""

    stages: int
    microbatches: int
    schedule: str
    remat: str
    bubble: float
    temporaries: int
    seconds: float


def pipeline(stages: int, microbatches: int, schedule: str, remat: str) -> Pipeline:
    config = TransformerConfig(
        vocab_size=512,
        layers=LAYERS,
        width=WIDTH,
        heads=4,
        kv_heads=4,
        head_dim=32,
        mlp_width=344,
        max_seq_len=CONTEXT,
        layer_loop="scan",
        remat=remat,
    )
    return Pipeline(build(config), lc.make_mesh(1, stages), microbatches, schedule=schedule)


def rows(stages: int, microbatches: int, repeats: int) -> list[PipelineRow]:
    """All variants at one number of microbatches, timed side by side."""
    found, runs = {}, {}
    for variant in VARIANTS:
        pipe = pipeline(stages, microbatches, *variant)
        found[variant] = pipe, *_compiled(pipe, 2 * microbatches)
        runs[variant] = found[variant][2]
    seconds = interleave(runs, repeats)
    return [
        PipelineRow(stages, microbatches, *variant, pipe.bubble, used, median(seconds[variant]))
        for variant, (pipe, used, _) in found.items()
    ]


def _compiled(pipe: Pipeline, batch: int):
    """(bytes of temporaries, a run of one gradient step)."""
    key = jax.random.key(0)
    specs = pipe.specs(jax.eval_shape(pipe.init, key))
    where = jax.tree.map(lambda spec: NamedSharding(pipe.mesh, spec), specs)
    params = jax.device_put(jax.jit(pipe.init)(key), where)
    tokens = jax.random.randint(key, (batch, CONTEXT + 1), 0, 512, jnp.int32)
    step = jax.jit(jax.grad(lambda p, t: pipe.loss_fn(p, {"tokens": t}, key)[0]))
    compiled = step.lower(params, tokens).compile()
    return memory_of(compiled)["temporaries"], lambda: compiled(params, tokens)


def show(found: Sequence[PipelineRow]) -> None:
    title = f"a gradient step of {LAYERS} blocks of width {WIDTH}: {machine()}"
    headings = ("stages x microbatches", "schedule", "remat", "bubble", "MB a device", "time")
    table = Table(*right(headings), title=title)
    for row in found:
        base = next(r for r in found if r[:2] == row[:2])
        table.add_row(
            f"{row.stages} x {row.microbatches}",
            row.schedule,
            row.remat,
            f"{row.bubble:.0%}",
            f"{row.temporaries / 1e6:.3g}",
            f"{row.seconds / base.seconds:.2f} x",
        )
    Console().print(table)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module's docstring for the flags."""
    options = Flags()
    options.whole("stages", 4, "pipeline stages")
    options.text("microbatches", "8,16,32", "numbers of microbatches")
    options.whole("repeats", 5, "rounds of every comparison")
    options.text("json", None, "also write the rows to this file")
    values = options.values
    problems = flag_problems("bench pipeline", argv, values, __doc__)
    counts = values.microbatches.split(",")
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        problems.append(f"--microbatches={values.microbatches}: give whole numbers: 8,16")
    problems += _unfit(values.stages)
    refuse_any(problems, "bench pipeline")
    each = tracked(counts, "bench pipeline: microbatches", str)
    found = [row for n in each for row in rows(values.stages, int(n), values.repeats)]
    show(found)
    write_rows(values.json, [row._asdict() for row in found])
    return 0


def _unfit(stages: int) -> list[str]:
    if not 1 <= stages <= LAYERS:
        return [f"--stages={stages}: use 1 to {LAYERS}"]
    if stages > jax.device_count():
        fix = f"XLA_FLAGS=--xla_force_host_platform_device_count={stages}"
        return [f"--stages={stages}: {jax.device_count()} devices here; use {fix}"]
    return []
