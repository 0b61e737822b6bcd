"""Speed and memory of training on the accelerator at hand, beside its compiler's figures.

    python -m experiments bench gpu [--repeats=5] [--json=gpu.json]

For 150M parameters, with one and with four regions on the card, and for 1.3B with one, it prints:

- tokens a second, model FLOPs utilisation, and a lower bound of a step's time (matrix products at
  the peak rate);
- the memory that the program asks for, and the most that was in use.

First it compares attention by kernel with plain products. On a CPU it runs a small model, without a
peak rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import lowcomm_jax as lc
from experiments.bench.work import held_bytes, interleave, median, write_rows
from experiments.cli import Flags, flag_problems, refuse_any
from experiments.progress import print_table, right, tracked
from lowcomm_jax.aot.arithmetic import matrix_flops
from lowcomm_jax.aot.hlo import parse
from lowcomm_jax.aot.targets import accelerator_of
from lowcomm_jax.models import Model, build, preset

STEPS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batch a region, and regions on the card."""

    preset: str
    batch: int
    length: int
    regions: int


# Four regions of 1.3B have 62 GB of parameters and moments alone.
# The device tells the most that was in use since the process began: what needs more comes later.
ON_CARDS = (
    Case("diloco_150m", 16, 1024, 4),
    Case("diloco_150m", 64, 1024, 1),
    Case("scaling_1_3b", 16, 2048, 1),
)
ON_PROCESSORS = tuple(Case("nano", 8 // regions, 64, regions) for regions in (1, 4))


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """One row: figures of training a case; None where the device does not give one."""
    device = jax.local_devices()[0]
    facts = accelerator_of(device)
    model = _model(case, device)
    stacked = ("blocks",) if model.config.layer_loop == "scan" else ()
    mesh = lc.make_mesh(devices=[device])
    method = lc.methods.diloco(10**6)
    engine = lc.Engine(
        model.loss_fn, optax.adamw(1e-4), method, case.regions, mesh=mesh, stacked=stacked
    )
    state = engine.init(model.init(jax.random.key(0)))
    rng = np.random.default_rng(0)
    shape = (case.regions, case.batch, case.length + 1)
    vocabulary = model.config.vocab_size
    batches = [{"tokens": rng.integers(0, vocabulary, shape, np.int32)} for _ in range(STEPS)]

    def run():
        nonlocal state
        state, _ = engine.run(state, batches)
        return state.inner.step

    seconds = median(interleave({"run": run}, repeats)["run"]) / STEPS
    compiled = _inner_step(engine, state, batches)
    flops = matrix_flops(parse(compiled.as_text()))
    analysis = compiled.memory_analysis()
    asked = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    tokens = case.regions * case.batch * case.length
    used = model.flops_per_token(case.length) * tokens
    stats = device.memory_stats() or {}
    held = held_bytes(state)
    inner = sum(x.nbytes for x in jax.tree.leaves(state.inner))
    return {
        "model": case.preset,
        "regions": case.regions,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "bound_seconds": None if facts is None else flops / facts.flops,
        "mfu": None if facts is None else used / seconds / facts.flops,
        "memory_foretold": asked + held - inner,
        "memory_used": stats.get("peak_bytes_in_use"),
    }


def _model(case: Case, device: jax.Device) -> Model:
    changes = {"remat": "full"} if case.preset != "nano" else {}
    changes |= {"compute_dtype": "bfloat16"} if device.platform != "cpu" else {}
    return build(preset(case.preset, **changes), device)


def _inner_step(engine: lc.Engine, state: Any, batches: Sequence[Any]) -> Any:
    staged = engine.place(jax.tree.map(lambda *x: np.stack(x, axis=1), *batches))
    program = engine.sync_loop(state).programs.inner_program
    given = (state.inner, state.frozen, staged, engine.runner.region_keys, None, np.int32(STEPS))
    return program.lower(*given).compile()


def attention_error() -> float | None:
    """Largest relative difference of a gradient by the device's kernel; None = it has none."""
    device = jax.local_devices()[0]
    case = dataclasses.replace(preset("diloco_150m", compute_dtype="bfloat16"), layers=2)
    kernel = build(case, device)
    if kernel.config.attention == "xla":
        return None
    plain = build(dataclasses.replace(case, attention="xla"), device)
    params, key = plain.init(jax.random.key(0)), jax.random.key(1)
    batch = {"tokens": jax.random.randint(key, (2, 513), 0, case.vocab_size)}
    one, two = (
        jax.jit(jax.grad(lambda p, m=m: m.loss_fn(p, batch, key)[0]))(params)
        for m in (kernel, plain)
    )
    apart = optax.tree.norm(jax.tree.map(jnp.subtract, one, two))
    return float(apart / optax.tree.norm(two))


def show(rows: Sequence[dict[str, Any]], error: float | None, console: Console) -> None:
    """Print the figures."""
    kind = jax.local_devices()[0].device_kind
    said = "no kernel here" if error is None else f"gradients within {error:.2%} of plain products"
    console.print(f"{kind}; attention: {said}")
    headings = ("regions", "tokens/s", "step", "at least", "MFU", "memory asked", "used")
    table = Table("model", *right(headings), title="training, one device")
    for row in rows:
        bound, used = row["bound_seconds"], row["memory_used"]
        table.add_row(
            row["model"],
            str(row["regions"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['step_seconds'] * 1e3:.3g} ms",
            "-" if bound is None else f"{bound * 1e3:.3g} ms",
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['memory_foretold'] / 1e9:.2f} GB",
            "-" if used is None else f"{used / 1e9:.2f} GB",
        )
    print_table(console, table, names=1)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module's docstring for the flags."""
    options = Flags()
    options.whole("repeats", 5, "timed runs of each case")
    options.text("json", None, "also write the rows to this file")
    values = options.values
    problems = flag_problems("bench gpu", argv, values, __doc__)
    if values.repeats < 1:
        problems.append(f"--repeats={values.repeats}: at least 1 is needed")
    refuse_any(problems, "bench gpu")
    cases = ON_PROCESSORS if jax.default_backend() == "cpu" else ON_CARDS
    shown = tracked(cases, "bench gpu", lambda case: f"{case.preset}, {case.regions} regions")
    rows, error = [measure(case, values.repeats) for case in shown], attention_error()
    show(rows, error, Console())
    write_rows(values.json, rows, attention_error=error)
    return 0
