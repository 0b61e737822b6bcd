"""Problems of a run that trains, a sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.progress import duration
from experiments.watch.record import Log

MISSED = 2  # exchanges in a row without a region
SILENT = 5  # as many usual log intervals without a record
SILENT_S = 30.0  # and at least so long
EVALS_APART = 1e-6  # relative: one anchor, evaluated on the same documents


def alarms(view: Mapping[str, Any], logs: Sequence[Log]) -> list[str]:
    """The alarms of a view, the worst first; empty where nothing is wrong."""
    return [
        *_not_finite(view, logs),
        *_anchors_apart(logs),
        *_behind(view, logs),
        *_left_out(logs),
        *_silent(view, logs),
    ]


def _not_finite(view: Mapping[str, Any], logs: Sequence[Log]) -> list[str]:
    found = []
    for region in (region for log in logs for region in log.regions.values()):
        if not region.finite:
            last = f"the last finite one was at step {region.loss_step}"
            found.append(
                f"region {region.number}: the loss of step {region.step} is not finite; {last}"
            )
        elif region.skipped and region.last_skipped > view["step"] - 2 * _interval(logs):
            found.append(
                f"region {region.number}: {region.skipped} steps skipped, the last at step "
                f"{region.last_skipped}: gradients were not finite"
            )
    step, loss = view["eval"]["step"], view["eval"]["loss"]
    if step is not None and loss is None:
        found.append(f"the loss of the anchor at step {step} is not finite")
    return found


def _anchors_apart(logs: Sequence[Log]) -> list[str]:
    """Regions with one anchor land the same mean, and evaluate to the same loss."""
    if len(logs) < 2 or any(log.own_anchors or log.header.get("consensus") for log in logs):
        return []
    first, found = logs[0], []
    for other in logs[1:]:
        here, there = _number(first), _number(other)
        shared = [key for key in first.norms if key in other.norms]
        parted = [key for key in shared if first.norms[key] != other.norms[key]]
        if parted:
            found.append(
                f"anchors apart: regions {here} and {there} landed payload {parted[-1]} with means "
                f"of other length ({first.norms[parted[-1]]!r}, {other.norms[parted[-1]]!r})"
            )
            continue
        if first.behind or other.behind:
            continue
        losses = {step: loss for step, loss, _ in first.evals}
        both = [(s, losses[s], b) for s, b, _ in other.evals if losses.get(s) and b]
        if both and abs(both[-1][1] - both[-1][2]) > EVALS_APART * abs(both[-1][1]):
            step, a, b = both[-1]
            found.append(
                f"anchors apart: at step {step} that of region {here} has the loss {a:.6f}, that "
                f"of region {there} {b:.6f}"
            )
    return found


def _behind(view: Mapping[str, Any], logs: Sequence[Log]) -> list[str]:
    found = []
    for log in logs:
        late = view["step"] - log.step
        if late > 2 * _interval(logs) and not log.complete:
            found.append(f"region {_number(log)} is {late} steps behind the first")
        if log.behind:
            found.append(
                f"region {_number(log)} could not reach the others: its anchor is at least "
                f"{log.behind} steps old"
            )
    missing = view["regions_of_run"] - len(view["regions"])
    if missing:
        found.append(f"{missing} of {view['regions_of_run']} regions have not begun")
    return found


def _left_out(logs: Sequence[Log]) -> list[str]:
    return [
        f"region {region.number} took no part in the last {region.missed} exchanges"
        for log in logs
        for region in log.regions.values()
        if region.missed >= MISSED
    ]


def _silent(view: Mapping[str, Any], logs: Sequence[Log]) -> list[str]:
    if view["complete"]:
        return []
    usual = max((log.interval[1] for log in logs if log.interval), default=None)
    if usual is None or view["age_s"] <= max(SILENT_S, SILENT * usual):
        return []
    return [
        f"no record for {duration(view['age_s'])}, where one is usual every {duration(usual)}: "
        "the run stands still, or was ended"
    ]


def _interval(logs: Sequence[Log]) -> int:
    """Steps between two records: a region is not late before these are over."""
    return max((log.interval[0] for log in logs if log.interval), default=1)


def _number(log: Log) -> int:
    return next(iter(log.regions))
