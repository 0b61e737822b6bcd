"""Compute the curves of the HTML report from the metrics of its runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.report.runlog import RunLog, adapts, exchanges, from_the_end, mean_sent
from experiments.report.stats import estimate
from experiments.report.virtual import Links, on_network, seconds_at

# Of the preset's bandwidth: a hundredth to ten times.
BANDWIDTHS = tuple(10.0 ** (k / 3) for k in range(-6, 4))
_WINDOWS = 40  # points of a curve that has a value a step


@dataclasses.dataclass(frozen=True)
class Plotted:
    """One line of every plot: a run, or the seeds of a variant."""

    name: str
    runs: tuple[RunLog, ...]


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points (x, y), and half the width of their intervals where there are several seeds."""

    name: str
    x: list[float]
    y: list[float]
    half: list[float] | None = None


@dataclasses.dataclass(frozen=True)
class Stale:
    """Inner steps between send and landing of one fragment: smallest, mean, largest."""

    name: str
    fragment: str
    low: int
    mean: float
    high: int


def loss_curves(entries: Sequence[Plotted], x_of: Callable[[RunLog], list[float]]) -> list[Curve]:
    """Evaluation loss of the anchor against `x_of(run)`, which has one value an evaluation.

    The evaluation before training is left out: it is the same for every method.
    """
    return [curve for entry in entries if (curve := _loss_curve(entry, x_of)) is not None]


def _loss_curve(entry: Plotted, x_of: Callable[[RunLog], list[float]]) -> Curve | None:
    x_ExR = from_the_end(x_of(run) for run in entry.runs)
    evals = from_the_end(run.evals for run in entry.runs)
    points = [
        (float(np.mean(x)), estimate([record["anchor"] for record in records]))
        for x, records in zip(x_ExR, evals)
        if records[0]["step"]
    ]
    points = [(x, y) for x, y in points if y.mean is not None]
    if not points:
        return None
    x, y = [x for x, _ in points], [found.mean for _, found in points]
    return Curve(entry.name, x, y, [f.half or 0.0 for _, f in points] if entry.runs[1:] else None)


def tokens_at(run: RunLog) -> list[float]:
    """Tokens of all regions at every evaluation."""
    return [record["tokens"] for record in run.evals]


def bytes_at(run: RunLog) -> list[float]:
    """Bytes sent per region at every evaluation; the last one is after the final exchange."""
    sent = {row["step"]: mean_sent(row) for row in run.steps} | {0: 0.0}
    total = mean_sent(run.end) if run.end else None
    return [total if e["final"] and run.end else sent[e["step"]] for e in run.evals]


def exchanges_at(run: RunLog) -> list[float]:
    """Steps so far at which something was sent, at every evaluation."""
    made = np.cumsum([exchanges(row) for row in run.steps]).astype(float)
    steps = [row["step"] for row in run.steps]
    return [
        float(made[np.searchsorted(steps, e["step"], "right") - 1]) if e["step"] else 0.0
        for e in run.evals
    ]


def virtual_at(links: Links) -> Callable[[RunLog], list[float]]:
    """Virtual seconds on the network at every evaluation."""
    return lambda run: seconds_at(run, links, [e["step"] for e in run.evals])


def utilisation_curves(entries: Sequence[Plotted], links: Links) -> list[Curve]:
    """Utilisation of each entry's first run over the bandwidth of the slowest link, in Gbit/s."""
    scaled = [links.scaled(factor) for factor in BANDWIDTHS]
    return [
        Curve(
            entry.name,
            [float(one.network.slowest_gbps) for one in scaled],
            [on_network(entry.runs[0], one).clock.utilisation for one in scaled],
        )
        for entry in entries
    ]


def step_curves(
    entries: Sequence[Plotted], value: Callable[[Mapping[str, Any]], float | None]
) -> list[Curve]:
    """Means over windows of a value of each step of an entry's first run, over tokens."""
    curves = []
    for entry in entries:
        rows = [(row["tokens"], value(row)) for row in entry.runs[0].steps]
        known = [(t, v) for t, v in rows if v is not None and math.isfinite(v)]
        if known:
            parts = np.array_split(np.array(known, float), min(len(known), _WINDOWS))
            points = np.array([part.mean(axis=0) for part in parts])
            curves.append(Curve(entry.name, points[:, 0].tolist(), points[:, 1].tolist()))
    return curves


def exchange_curves(entries: Sequence[Plotted]) -> list[Curve]:
    """Exchanges so far against tokens, of each entry's first run; none unless some batches grow."""
    if not any(adapts(entry.runs[0]) for entry in entries):
        return []
    curves = []
    for entry in entries:
        run = entry.runs[0]
        made = np.cumsum([exchanges(row) for row in run.steps]).astype(float)
        tokens = np.array([row["tokens"] for row in run.steps], float)
        if not len(made) or made[-1] == 0:
            continue
        shown = np.unique(np.linspace(0, len(made) - 1, _WINDOWS).astype(int))
        curves.append(Curve(entry.name, tokens[shown].tolist(), made[shown].tolist()))
    return curves


def staleness(entries: Sequence[Plotted]) -> list[Stale]:
    """Of every fragment of each entry's first run."""
    found = []
    for entry in entries:
        by_fragment: dict[str, list[int]] = {}
        for row in entry.runs[0].steps:
            for event in row["events"]:
                if event["kind"] == "land" and event["fragment"] >= 0:
                    late = [s for s in event["staleness"] if s >= 0]
                    by_fragment.setdefault(str(event["fragment"]), []).extend(late)
        found += [
            Stale(entry.name, fragment, min(late), float(np.mean(late)), max(late))
            for fragment, late in sorted(by_fragment.items())
            if late
        ]
    return found
