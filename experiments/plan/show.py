"""Print the tables of a plan, behind its short answer, and draw its picture."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table

from experiments.progress import right
from lowcomm_jax.planner.dag import TARGETS
from lowcomm_jax.planner.plan import PlanRow, Workload


def show(result: dict, rows: Sequence[PlanRow], console: Console) -> None:
    """Print the tables, and what the answer (`screen.show_answer`) does not say."""
    network = result["network"]
    source, trust = network["source"], network["confidence"]
    shown = source if source.startswith(trust) else f"{trust}: {source}"
    console.print(f"network: {network['name']} ({shown})")
    if result["notes"]:
        console.print(result["notes"])
    for some in _columns(rows, console.width):
        _show_rows(some, console)
    console.print(f"{result['baseline']}. All figures: steady periods, no jitter.")
    for row in rows:
        if not row.played.repeats:
            steps = row.played.steps - row.played.warm
            console.print(f"{row.method.name}: means over {steps} played steps")
    _show_bandwidth(rows, console)
    for label in dict.fromkeys(row.loss.total_label for row in rows if row.loss.total is None):
        console.print(f"no expected loss: {label}")
    _show_best(result, console)


def _show_best(result: dict, console: Console) -> None:
    best = result["best"]
    if not best:
        console.print("no searched setting has a published loss penalty within the bound")
        return
    console.print(
        f"best setting within the loss bound: H={best['period']} K={best['fragments']} "
        f"tau={best['tau']} {best['codec']}: utilisation {best['utilisation']:.1%}, penalty "
        f"{best['penalty_nats']:.3f} nats ({best['penalty_confidence']}); "
        f"{result['settings_tried']} tried, {result['settings_left_out']} left out "
        "(no published penalty, above the bound, or never catching up)"
    )


LABEL_WIDTH, COLUMN_WIDTH = 30, 12  # of the table of rows


def _columns(rows: Sequence[PlanRow], width: int) -> list[Sequence[PlanRow]]:
    """Split the methods so that a table fits the terminal."""
    each = max(1, (width - LABEL_WIDTH) // COLUMN_WIDTH)
    return [rows[i : i + each] for i in range(0, len(rows), each)]


def _loss(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


_ROWS = {
    "H / K / tau": lambda r: f"{r.method.period}/{r.method.fragments}/{r.method.tau}",
    "codec": lambda r: f"{r.method.codec}".replace("_", " "),
    "route": lambda r: r.route.replace("_", " "),
    "GB a period, per region": lambda r: f"{r.sent_bytes_per_period / 1e9:.3g}",
    "TB a run, per region": lambda r: f"{r.sent_bytes_total / 1e12:.3g}",
    "seconds of its exchanges": lambda r: f"{r.transfer_s:.3g}",
    "utilisation": lambda r: f"{r.utilisation:.1%}",
    "hours": lambda r: f"{r.hours:.4g}",
    "tokens/s": lambda r: f"{r.tokens_per_s:.4g}",
    "faster than AllReduce": lambda r: f"{r.speedup:.4g}x",
    "GB state a device (by share)": lambda r: f"{r.memory.state_total / 1e9:.1f}",
    "GB more a device (estimate)": lambda r: f"{r.memory.estimate_total / 1e9:.1f}",
    "loss, scaling law alone": lambda r: _loss(r.loss.law),
    "loss, law + penalty": lambda r: _loss(r.loss.total),
    "penalty alone, nats": lambda r: "?" if r.penalty_nats is None else f"{r.penalty_nats:+.3f}",
}


def _show_rows(rows: Sequence[PlanRow], console: Console) -> None:
    """One column a method: a few methods fit a narrow terminal."""
    names = right(row.method.name.replace("_", " ") for row in rows)
    table = Table(Column("", no_wrap=True), *names, box=box.SIMPLE_HEAD)
    for heading, cell in _ROWS.items():
        table.add_row(heading, *(cell(row) for row in rows))
    console.print(table)


def _show_bandwidth(rows: Sequence[PlanRow], console: Console) -> None:
    columns = Column("method", no_wrap=True), *right(f"{target:.0%}" for target in TARGETS)
    table = Table(*columns, title="smallest bandwidth of the slowest link, Gbit/s")
    for row in rows:
        cells = ("-" if gbps is None else f"{gbps:.3g}" for gbps in row.needed_gbps.values())
        table.add_row(row.method.name, *cells)
    console.print(table)


def picture(rows: Sequence[PlanRow], work: Workload, path: Path, title: str) -> None:
    """Draw utilisation against bandwidth, and loss (or published penalty) against hours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    known = any(row.loss.total is not None for row in rows)
    labels = []
    for number, row in enumerate(rows):
        colour = f"C{number % 10}"
        left.plot(
            row.scales * work.network.slowest_gbps, row.curve, label=row.method.name, color=colour
        )
        height = row.loss.total if known else row.penalty_nats
        if height is not None:
            right.scatter([row.hours], [height], color=colour)
            label = right.annotate(
                row.method.name,
                (row.hours, height),
                textcoords="offset points",
                xytext=(5, 4),
                fontsize=8,
                color=colour,
            )
            labels.append(label)
    left.axvline(work.network.slowest_gbps, color="black", lw=0.8, ls=":")
    left.set(
        xscale="log",
        xlabel="Gbit/s of the slowest link",
        ylabel="compute utilisation",
        ylim=(0, 1.02),
    )
    left.legend(fontsize=8)
    label = (
        "expected evaluation loss (law + penalty)"
        if known
        else "published loss penalty beside H = 30 (nats)"
    )
    right.set(xscale="log", xlabel="hours on this network", ylabel=label)
    right.margins(x=0.25, y=0.15)
    figure.suptitle(title)
    lift_labels(figure, labels)
    figure.savefig(path, dpi=150)


def lift_labels(figure, labels: Sequence) -> None:
    """Move annotations up, until none covers another.

    Args:
        figure: whose layout is final.
        labels: annotations with their offset in points.
    """
    figure.draw_without_rendering()
    taken = []
    for label in labels:
        box = label.get_window_extent()
        for _ in range(2 * len(taken)):  # past all of them; one outside the axes has no place
            if not any(box.overlaps(other) for other in taken):
                break
            across, up = label.xyann
            label.xyann = (across, up + 1.3 * label.get_fontsize())
            box = label.get_window_extent()
        taken.append(box)
