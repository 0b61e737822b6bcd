"""Real links against the virtual clock, and the computing time of the clock.

    python -m experiments bench wan [--rates=25,100,500] [--methods=diloco,cocodc] [--periods=24]
        [--batch=16]

First it measures the simulation's own seconds at several sizes, and fits an exponent. Beside the
ratio of the seconds of neighbouring sizes stands the ratio of the sizes; with linear growth they
are equal. A table says how long regions are idle with and without a global barrier.

Then, on Linux as root, two jobs train over links that are limited to each rate (Mbit/s). It prints
how much of an exchange they wait for, and the clock's error (`links`). This takes some twenty
minutes, on an otherwise idle machine with two cores.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.bench import links, netem
from experiments.cli import Flags, flag_problems, refuse_any
from experiments.progress import right, tracked
from lowcomm_jax.network import Jitter, VirtualClock, every_step, uniform
from lowcomm_jax.network.randomness import generator
from lowcomm_jax.planner.noloco_latency import idle_table

SIZES = (125, 250, 500, 1000, 2000)
IDLE_SIZES = (100, 1000, 10_000)


def noloco_seconds(regions: int, rounds: int, period: int = 50) -> float:
    """Give the seconds of a NoLoCo run on the virtual clock: random pairs every `period` steps.

    Building the network (a regions x regions matrix) is not counted.
    """
    network = uniform(
        regions,
        1.0,
        delay_s=0.05,
        compute_s=0.1,
        compute_jitter=Jitter("lognormal", 0.3),
        transfer_jitter=Jitter("lognormal", 0.5),
    )
    clock = VirtualClock(network, seed=0)
    started = time.perf_counter()
    for number in range(rounds):
        clock.inner_steps(1 + number * period, period)
        order = generator(0, "pairs", number).permutation(regions)[: regions // 2 * 2]
        step = (number + 1) * period
        clock.send(step, "delta", 1e7, "pair", groups=order.reshape(-1, 2).tolist())
        clock.land(step, "delta")
    return time.perf_counter() - started


def idle_seconds(regions: int, rounds: int) -> float:
    """Give the seconds of the vectorised idle simulation."""
    started = time.perf_counter()
    idle_table(regions, rounds)
    return time.perf_counter() - started


def clock_microseconds(sync_every: int, steps: int = 2000, regions: int = 8) -> float:
    """Give microseconds per inner step of the clock, one two-shot exchange every `sync_every`
    steps.
    """
    clock = VirtualClock(uniform(regions, 1.0, delay_s=0.05, compute_s=0.3))
    started = time.perf_counter()
    for step in range(1, steps + 1):
        clock.inner_step(step)
        if step % sync_every == 0:
            clock.send(step, 0, 1e6, "two_shot")
            clock.land(step, 0)
    return (time.perf_counter() - started) / steps * 1e6


def together_microseconds(steps: int = 2000, regions: int = 8) -> float:
    """Give microseconds per step of data parallel training whose steps are worked out together."""
    clock = VirtualClock(uniform(regions, 1.0, delay_s=0.05, compute_s=0.3))
    started = time.perf_counter()
    every_step(clock, 1, steps, 1e6)
    return (time.perf_counter() - started) / steps * 1e6


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module's docstring for the flags."""
    options = Flags()
    options.text("rates", ",".join(f"{r:g}" for r in links.RATES), "Mbit/s of the real links")
    options.text("methods", ",".join(links.METHODS), "what trains over them")
    options.whole("periods", 24, "periods of each run after its warm-up")
    options.whole(
        "batch", 16, "sequences of a step: more of them, and more of an exchange is hidden"
    )
    values = options.values
    problems = flag_problems("bench wan", argv, values, __doc__)
    rates, methods, wrong = _chosen(values)
    refuse_any(problems + wrong, "bench wan")
    console = Console()
    measure(console=console)
    missing = netem.problems()
    if missing:
        console.print(f"real links are left out: {'; '.join(missing)}", highlight=False)
        return 0
    rows = list(links.rows(methods, rates, values.periods, values.batch, console))
    console.print(links.table(rows))
    return 0


def _chosen(values) -> tuple[list[float], list[str], list[str]]:
    """(rates, methods, what is wrong with them)."""
    methods = values.methods.split(",")
    wrong = [
        f"--methods: {m!r} is none of {', '.join(links.METHODS)}"
        for m in methods
        if m not in links.METHODS
    ]
    try:
        rates = [float(rate) for rate in values.rates.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < np.inf for rate in rates):
        wrong.append(f"--rates={values.rates}: give Mbit/s above 0, with commas between them")
    wrong += [
        f"--{name}={getattr(values, name)}: give at least 1"
        for name in ("periods", "batch")
        if getattr(values, name) < 1
    ]
    return rates, methods, wrong


def measure(
    sizes: Sequence[int] = SIZES,
    rounds: int = 10,
    repeats: int = 3,
    console: Console | None = None,
) -> dict:
    """Run the benchmark, print its tables and give the numbers (best of `repeats`)."""
    console = console or Console()
    result: dict = {"clock": [], "idle": [], "exponent": {}, "step": []}
    for label, timed, factor in (("clock", noloco_seconds, 1), ("idle", idle_seconds, 10)):
        for size in tracked(sizes, f"bench wan: {label}", lambda size: f"{size} regions"):
            best = min(timed(size * factor, rounds) for _ in range(repeats))
            result[label].append({"regions": size * factor, "rounds": rounds, "seconds": best})
        result["exponent"][label] = fitted_exponent(result[label])
        _show(label, result[label], result["exponent"][label], console)
    for every in tracked((1, 10, 100), "bench wan: a step of the clock"):
        best = min(clock_microseconds(every) for _ in range(repeats))
        result["step"].append({"sync_every": every, "microseconds": best})
        console.print(
            f"clock, 8 regions, exchange every {every} steps: {best:.1f} us per inner step"
        )
    best = min(together_microseconds() for _ in range(repeats))
    result["together"] = best
    console.print(f"clock, 8 regions, data parallel steps together: {best:.2f} us per inner step")
    result["shares"] = [
        dataclasses.asdict(idle_table(size, 100))
        for size in tracked(IDLE_SIZES, "bench wan: idle shares", lambda size: f"{size} regions")
    ]
    _show_idle(result["shares"], console)
    return result


def fitted_exponent(rows: Sequence[dict]) -> float:
    """Give x of seconds ~ regions ** x, by least squares of the logarithms (1 = linear)."""
    size, cost = ([row[key] for row in rows] for key in ("regions", "seconds"))
    return float(np.polyfit(np.log(size), np.log(cost), 1)[0])


def _show(label: str, rows: list[dict], exponent: float, console: Console) -> None:
    titles = {"clock": "NoLoCo on the virtual clock", "idle": "idle simulation (vectorised)"}
    headings = ("regions", "seconds", "time ratio", "size ratio")
    table = Table(*right(headings), title=f"{titles[label]}, {rows[0]['rounds']} rounds")
    for before, row in zip([None, *rows], rows, strict=False):
        cells = ["", ""]
        if before is not None:
            ratio, size = row["seconds"] / before["seconds"], row["regions"] / before["regions"]
            cells = [f"{ratio:.2f}", f"{size:.2f}"]
        table.add_row(str(row["regions"]), f"{row['seconds']:.4f}", *cells)
    console.print(table)
    console.print(f"cost ~ regions ** {exponent:.2f}, fitted over all sizes (1 = linear)")


def _show_idle(rows: list[dict], console: Console) -> None:
    title = f"share of the time regions stand idle, {rows[0]['rounds']} rounds"
    table = Table(*right(("regions", "global barrier", "pairs only")), title=title)
    for row in rows:
        table.add_row(str(row["regions"]), f"{row['barrier_idle']:.0%}", f"{row['pair_idle']:.0%}")
    console.print(table)
