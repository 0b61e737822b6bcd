"""Tables and picture of a plan."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lowcomm_jax.network.dag import TARGETS
from lowcomm_jax.network.planner import PlanRow, Workload


def show(result: dict, rows: Sequence[PlanRow], console: Console) -> None:
    """Print the tables."""
    network = result["network"]
    console.print(
        f"[bold]{result['name']}[/bold]: {result['params'] / 1e9:.4g}B parameters, "
        f"{len(network['regions'])} regions, "
        f"slowest link {network['slowest_gbps']:g} Gbit/s, {result['step_s']:.3g} s per step, "
        f"{result['steps']:.4g} steps"
    )
    console.print(f"network: {network['name']} ({network['confidence']}: {network['source']})")
    if result["notes"]:
        console.print(result["notes"])
    _show_rows(rows, console)
    _show_bandwidth(rows, console)
    for warning in (w for row in rows for w in row.warnings):
        console.print(f"[yellow]warning[/yellow] {warning}")
    for label in dict.fromkeys(f"{r.loss_label}" for r in rows if r.loss is None):
        console.print(f"no expected loss: {label}")
    best = result["best"]
    if best:
        console.print(
            f"best setting within the loss bound: H={best['period']} K={best['fragments']} "
            f"tau={best['tau']} "
            f"{best['codec']}: utilisation {best['utilisation']:.1%}, penalty "
            f"{best['penalty_nats']:.3f} nats "
            f"({best['penalty_confidence']}); {result['settings_tried']} tried, "
            f"{result['settings_left_out']} left out "
            "(no published penalty, or above the bound)"
        )
    else:
        console.print("no searched setting has a published loss penalty within the bound")
    _show_published(result["published"], console)


_ROWS = {
    "GB an exchange, per region": lambda r: f"{r.sent_bytes_per_period / 1e9:.3g}",
    "TB a run, per region": lambda r: f"{r.sent_bytes_total / 1e12:.3g}",
    "seconds an exchange": lambda r: f"{r.transfer_s:.3g}",
    "utilisation": lambda r: f"{r.utilisation:.1%}",
    "hours": lambda r: f"{r.hours:.4g}",
    "tokens/s": lambda r: f"{r.tokens_per_s:.4g}",
    "faster than AllReduce": lambda r: f"{r.speedup:.4g}x",
    "GB state a device (exact)": lambda r: f"{r.memory.state_total / 1e9:.1f}",
    "GB activations (estimate)": lambda r: f"{r.memory.activations / 1e9:.1f}",
    "expected loss": lambda r: "-" if r.loss is None else f"{r.loss:.3f}",
    "loss penalty, nats": lambda r: "?" if r.penalty_nats is None else f"{r.penalty_nats:+.3f}",
}


def _show_rows(rows: Sequence[PlanRow], console: Console) -> None:
    """One column a method: a few methods fit a narrow terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for row in rows:
        table.add_column(row.method.name.replace("_", " "), justify="right")
    for heading, cell in _ROWS.items():
        table.add_row(heading, *(cell(row) for row in rows))
    console.print(table)


def _show_bandwidth(rows: Sequence[PlanRow], console: Console) -> None:
    table = Table(title="smallest bandwidth of the slowest link, Gbit/s")
    table.add_column("method", no_wrap=True)
    for target in TARGETS:
        table.add_column(f"{target:.0%}", justify="right")
    for row in rows:
        cells = ("-" if gbps is None else f"{gbps:.3g}" for gbps in row.needed_gbps.values())
        table.add_row(row.method.name, *cells)
    console.print(table)


def _show_published(entries: Sequence[dict], console: Console) -> None:
    if not entries:
        return
    table = Table(title="beside the published figures (errors stated, not tuned away)")
    for heading in ("what", "unit", "ours", "published", "error", "confidence"):
        table.add_column(heading)
    for entry in entries:
        low, high = entry["published"]
        shown = f"{low:.4g}" if low == high else f"{low:.4g} - {high:.4g}"
        cells = (
            entry["what"],
            entry["unit"],
            f"{entry['ours']:.4g}",
            shown,
            f"{entry['error']:+.1%}",
        )
        table.add_row(*cells, entry["confidence"])
    console.print(table)


def picture(rows: Sequence[PlanRow], work: Workload, path: Path, title: str) -> None:
    """Draw utilisation against bandwidth, and loss (or published penalty) against hours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    known = any(row.loss is not None for row in rows)
    for number, row in enumerate(rows):
        colour = f"C{number % 10}"
        left.plot(
            row.scales * work.network.slowest_gbps, row.curve, label=row.method.name, color=colour
        )
        height = row.loss if known else row.penalty_nats
        if height is not None:
            right.scatter([row.hours], [height], color=colour)
            right.annotate(
                row.method.name,
                (row.hours, height),
                textcoords="offset points",
                xytext=(5, 4),
                fontsize=8,
            )
    left.axvline(work.network.slowest_gbps, color="black", lw=0.8, ls=":")
    left.set(
        xscale="log",
        xlabel="Gbit/s of the slowest link",
        ylabel="compute utilisation",
        ylim=(0, 1.02),
    )
    left.legend(fontsize=8)
    label = "expected evaluation loss" if known else "published loss penalty beside H = 30 (nats)"
    right.set(xscale="log", xlabel="hours on this network", ylabel=label)
    right.margins(x=0.25, y=0.15)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
