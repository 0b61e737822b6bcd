"""Draw the loss curves of runs from their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.progress import thousands
from experiments.report.html_data import Entry, step_curves
from experiments.runlog import RunLog


def loss_curves(runs: Sequence[RunLog], path: Path) -> None:
    """Draw loss against tokens: training loss per region and the evaluated anchor."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    if len(runs) == 1:
        for column, region in enumerate(runs[0].header["here"]):
            _training(axes, runs[0], column, alpha=0.8, label=f"region {region}, training")
    for number, run in enumerate(runs):
        # The evaluation before training does not depend on the method.
        evals = [e for e in run.evals if e["step"] and e["anchor"] is not None]
        tokens, losses = [e["tokens"] for e in evals], [e["anchor"] for e in evals]
        colour = "black" if len(runs) == 1 else f"C{number % 10}"
        label = "anchor, validation" if len(runs) == 1 else f"{run.name}, anchor, validation"
        axes.plot(tokens, losses, "o-", ms=4, color=colour, label=label)
        if len(runs) > 1:
            _training(axes, run, None, color=colour, alpha=0.35)
    title = ", ".join(dict.fromkeys(run.header["method"] for run in runs))
    regions = "/".join(dict.fromkeys(str(run.header["regions"]) for run in runs))
    _leave_out_the_first_fall(axes, runs)
    axes.set(xlabel="tokens, all regions", ylabel="loss, nats per token")
    axes.set_title(f"{title}: {regions} regions, corpus {runs[0].header['data']['corpus']}")
    axes.xaxis.set_major_formatter(thousands)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _leave_out_the_first_fall(axes, runs: Sequence[RunLog]) -> None:
    """Start the axis at the losses after 3 % of the run; earlier ones would fill the picture."""
    start = [run.steps[len(run.steps) // 33]["loss_mean"] for run in runs if run.steps]
    seen = [loss for loss in start if loss is not None]
    if seen and all(len(run.steps) >= 100 for run in runs):
        axes.set_ylim(top=1.05 * max(seen))


def _training(axes, run: RunLog, column: int | None, **style) -> None:
    """The training loss of one region, averaged over windows; None = the mean of all."""
    kind = "ce" if run.steps and "ce" in run.steps[0] else "loss"

    def value(row):
        losses = row[kind] if column is None else [row[kind][column]]
        return None if None in losses else sum(losses) / len(losses)

    for curve in step_curves([Entry(run.name, (run,))], value):
        axes.plot(curve.x, curve.y, lw=1, **style)
