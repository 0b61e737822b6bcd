"""Losses at equal virtual time and at equal bytes, of methods trained on equal tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.progress import size
from experiments.report.columns import brief
from experiments.report.html_data import bytes_at, virtual_at
from experiments.report.runlog import RunLog
from experiments.report.virtual import Links


def at_equal(
    logs: Mapping[str, Mapping[int, RunLog]], networks: Mapping[str, Links]
) -> list[dict[str, Any]]:
    """Every variant's loss when it had spent a common budget, by virtual time and by bytes.

    The budget is the least that any variant spent in all, so that every variant reached it. Between
    two evaluations losses are interpolated linearly; several seeds are averaged.

    Args:
      logs: variant -> seed -> complete run.
      networks: the time is that of the first network; without networks no time is given.

    Returns:
      One entry for "time" (first, since a slow method may save bytes) and one for "bytes". Each has
      `of`, `network` (None for bytes), `budget` (seconds, or bytes a region) and `losses`, variant
      -> nats per token. Empty where fewer than two variants are complete. A variant with a loss
      that is not finite is left out; so is one that spends nothing, as a single region sends no
      bytes. So is one that was judged on another evaluation set until beyond the budget.
    """
    spent = {"bytes": (None, bytes_at)}
    for name, links in list(networks.items())[:1]:
        spent = {"time": (name, virtual_at(links)), **spent}
    found = []
    for of, (network, x_of) in spent.items():
        curves = {
            name: [_curve(run, x_of(run)) for run in runs.values()]
            for name, runs in logs.items()
            if runs and all(e["anchor"] is not None for r in runs.values() for e in r.evals)
        }
        curves = {n: seeds for n, seeds in curves.items() if all(x[-1] > 0 for x, _ in seeds)}
        ends = [x[-1] for of_seeds in curves.values() for x, _ in of_seeds]
        budget = min(ends, default=0.0)
        curves = {n: seeds for n, seeds in curves.items() if all(x[0] <= budget for x, _ in seeds)}
        if len(curves) < 2:
            continue
        losses = {
            # Where nothing is spent between two evaluations, the later loss counts.
            name: float(np.mean([np.interp(budget, *curve) for curve in of_seeds]))
            for name, of_seeds in curves.items()
        }
        found.append({"of": of, "network": network, "budget": budget, "losses": losses})
    return found


def sentence(found: Sequence[Mapping[str, Any]], baseline: str, seeds: int) -> str:
    """The best variants of `at_equal`, a sentence each; empty where there is nothing to compare.

    Args:
      baseline: a variant that is named beside the best ones.
      seeds: number of seeds; with one the sentence says that it is no ranking.
    """
    if not found:
        return ""
    parts = [_part(entry, baseline) for entry in found]
    trust = "one seed: a first look, no ranking" if seeds == 1 else f"means over {seeds} seeds"
    return f"At {'. At '.join(parts)} ({trust})."


def _part(entry: Mapping[str, Any], baseline: str) -> str:
    if entry["of"] == "time":
        budget = f"equal time ({brief(entry['budget'])} on {entry['network']})"
    else:
        budget = f"equal bytes ({size(entry['budget'])} a region)"
    order = sorted(entry["losses"], key=entry["losses"].get)
    best, others = order[0], order[1:2]
    if baseline in order and baseline not in (best, *others):
        others.append(baseline)
    rest = " and ".join(f"{name} at {entry['losses'][name]:.3f}" for name in others)
    return f"{budget} {best} has the lowest loss, {entry['losses'][best]:.3f}, with {rest}"


def _curve(run: RunLog, x: Sequence[float]) -> tuple[list[float], list[float]]:
    return list(x), [record["anchor"] for record in run.evals]
