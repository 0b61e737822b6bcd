"""Speed and memory of the engine, as ratios taken side by side in one run.

    python -m experiments bench engine [--size=small|reference] [--repeats=9] [--torch]

Prints a table with each ratio, its target and whether it was met, and the machine it ran on.
`--torch` adds a plain PyTorch loop of the same work (needs `pip install torch`).
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import lowcomm_jax as lc
from experiments.bench import events, gossip, torch_loop, trainers
from experiments.bench.timing import interleave, median, ratio
from experiments.bench.work import SIZES, EngineRow, engine_loop, make_work, plain_loop
from experiments.cli import Flags, flag_problems, refuse_any
from experiments.progress import tracked


def throughput(size: str, repeats: int, with_torch: bool) -> list[EngineRow]:
    """tokens/s of one region against a plain loop, and of four regions against one."""
    work = make_work(size, steps=8)
    never = lc.methods.diloco(10**6)
    variants = {
        "plain": plain_loop(work),
        "one": engine_loop(work, never, 1),
        "four map": engine_loop(work, never, 4),
        "four vmap": engine_loop(work, never, 4, "vmap"),
    }
    if with_torch:
        variants["torch"] = torch_loop.loop(work)
    seconds = interleave(variants, repeats)
    one = ratio(seconds["plain"], seconds["one"])
    four_map = 4 * ratio(seconds["one"], seconds["four map"])
    four_vmap = 4 * ratio(seconds["one"], seconds["four vmap"])
    best = max(four_map, four_vmap)
    rows = [
        EngineRow("plain jit + Optax loop", work.tokens / median(seconds["plain"]), "tokens/s"),
        EngineRow("diloco R=1 / plain loop", one, "x", ">= 0.97", one >= 0.97),
        EngineRow("per token, R=4 map / R=1", four_map, "x"),
        EngineRow("per token, R=4 vmap / R=1", four_vmap, "x"),
        EngineRow("per token, R=4 (better one) / R=1", best, "x", ">= 0.97", best >= 0.97),
    ]
    if with_torch:
        torch_one = ratio(seconds["torch"], seconds["one"])
        torch_four = 4 * ratio(seconds["torch"], seconds[_better(four_map, four_vmap)])
        rows += [
            EngineRow("PyTorch loop", work.tokens / median(seconds["torch"]), "tokens/s"),
            EngineRow("R=1 / PyTorch", torch_one, "x", ">= 1.0", torch_one >= 1),
            EngineRow("R=4 / PyTorch", torch_four, "x", ">= 1.0", torch_four >= 1),
        ]
    return rows


def _better(four_map: float, four_vmap: float) -> str:
    return "four map" if four_map >= four_vmap else "four vmap"


def memory(size: str) -> list[EngineRow]:
    """Live bytes per added region, against parameters + optimizer state + one anchor."""
    work = make_work(size, steps=2)
    one_model = sum(x.nbytes for x in jax.tree.leaves(work.params))
    allowed = one_model * (1 + 2 + 1)
    peak = {}
    for regions in (1, 8):
        engine = lc.Engine(
            work.model.loss_fn,
            optax.adamw(3e-4),
            lc.methods.diloco(2),
            regions,
            mesh=lc.make_mesh(devices=jax.devices()[:1]),
        )
        state = engine.init(work.params)
        state, _ = engine.run(state, work.batches(regions))
        jax.block_until_ready(state.anchor)
        loop = engine.sync_loop(state)
        block = loop.programs.inner_program
        staged = engine.place(jax.tree.map(lambda *x: np.stack(x, axis=1), *work.batches(regions)))
        args = (state.inner, state.frozen, staged, engine.region_ids, None, np.int32(2))
        analysis = block.lower(*args).compile().memory_analysis()
        held = sum(x.nbytes for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
        peak[regions] = held + analysis.temp_size_in_bytes
        del state
    growth = (peak[8] - peak[1]) / 7 / allowed
    return [
        EngineRow("memory at R=1 / (parameters + Adam + anchor)", peak[1] / allowed, "x"),
        EngineRow(
            "growth per region / (parameters + Adam + anchor)", growth, "x", "<= 1", growth <= 1
        ),
    ]


def machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def show(rows: Sequence[EngineRow], title: str) -> None:
    table = Table(title=title)
    for name in ("figure", "measured", "target", "met"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for row in rows:
        met = "" if row.met is None else ("yes" if row.met else "NO")
        table.add_row(row.name, f"{row.value:,.3g} {row.unit}", row.target, met)
    Console().print(table)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module's docstring for the flags."""
    options = Flags()
    options.text("size", "reference", "model: small or reference")
    options.whole("repeats", 9, "rounds of every comparison")
    options.switch("torch", "compare with PyTorch too")
    options.text("json", None, "also write the rows to this file")
    values = options.values
    problems = flag_problems("bench engine", argv, values, __doc__)
    if values.size not in SIZES:
        problems.append(f"--size={values.size}: use {' or '.join(SIZES)}")
    refuse_any(problems, "bench engine")
    size, repeats = values.size, values.repeats
    parts = {
        "throughput": lambda: throughput(size, repeats, values.torch),
        "memory": lambda: memory(size),
        "events": lambda: events.rows(make_work(size, steps=1), repeats),
        "trainers": lambda: trainers.rows(make_work(size, steps=1), repeats),
        "gossip": lambda: gossip.rows(repeats),
    }
    rows = [row for name in tracked(parts, "bench engine", str) for row in parts[name]()]
    show(rows, f"engine ({values.size}): {machine()}")
    if values.json:
        record = {"machine": machine(), "rows": [row._asdict() for row in rows]}
        Path(values.json).write_text(json.dumps(record, indent=1))
    return 0
