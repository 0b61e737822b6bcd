"""Draw the loss curves of runs from their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.progress import thousands
from experiments.runlog import RunLog

_SMOOTHED_OVER = 50  # curves of noisy training losses show about this many windows


def loss_curves(runs: Sequence[RunLog], path: Path) -> None:
    """Draw loss against tokens: training loss per region and the evaluated anchor."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    if len(runs) == 1:
        _regions(axes, runs[0])
    for number, run in enumerate(runs):
        # The evaluation before training does not depend on the method.
        evals = [e for e in run.evals if e["step"]]
        tokens = [e["tokens"] for e in evals]
        colour = "black" if len(runs) == 1 else f"C{number % 10}"
        label = "anchor, validation" if len(runs) == 1 else f"{run.name}, anchor, validation"
        axes.plot(tokens, _values(evals, "anchor"), "o-", ms=4, color=colour, label=label)
        if len(runs) > 1:
            axes.plot(*_smooth(run, None), color=colour, alpha=0.35, lw=1)
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


def _regions(axes, run: RunLog) -> None:
    here = run.header.get("here", range(run.header["regions"]))
    for column, region in enumerate(here):
        axes.plot(*_smooth(run, column), lw=1, alpha=0.8, label=f"region {region}, training")


def _smooth(run: RunLog, region: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, training loss) averaged over windows; region None = the mean of all."""
    if not run.steps:
        return np.empty(0), np.empty(0)
    key = "ce" if "ce" in run.steps[0] else "loss"
    loss_SxR = np.array([_numbers(step[key]) for step in run.steps]).reshape(len(run.steps), -1)
    loss_S = loss_SxR.mean(axis=1) if region is None else loss_SxR[:, region]
    tokens_S = np.array([step["tokens"] for step in run.steps])
    window = max(1, len(loss_S) // _SMOOTHED_OVER)
    whole = len(loss_S) // window * window
    return (
        tokens_S[:whole].reshape(-1, window).mean(axis=1),
        loss_S[:whole].reshape(-1, window).mean(axis=1),
    )


def _values(records: Sequence[dict], key: str) -> list[float]:
    return _numbers(record[key] for record in records)


def _numbers(values) -> list[float]:
    return [float("nan") if value is None else value for value in values]
