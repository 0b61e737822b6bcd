"""Choose the steps of every variant, for comparisons at equal bytes or equal virtual time.

The baseline makes its configured steps; its cost is the budget of all variants. `budgeted` measures
the cost of a step of each variant in a pilot run of a few periods (WORKDIR/pilot). Each variant
then gets as many whole periods as the budget allows, and a learning-rate schedule of that length.

Where batches grow or trainers merge, steps differ in cost, and the pilot is a run of the configured
length. The variant gets the (nominal) steps at which the pilot had spent the budget. In the
run proper the batches grow on another schedule and with other seeds, so it ends near the budget;
`budget_deviation` says how near.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from experiments.cli import refuse_any
from experiments.compare.config import BUDGETED
from experiments.compare.plan import TITLE, Comparison, RunSpec, error_of, finished
from experiments.compare.runs import run_all
from experiments.report.html_data import bytes_at
from experiments.report.runlog import RunLog, mean_sent, nominal_steps, read_run
from experiments.report.virtual import seconds_at

PILOT = "pilot"
_PERIODS = 4  # of a pilot; its cost per step is that of the second half, past the start


def budgeted(comparison: Comparison, console: Console) -> Comparison | None:
    """The comparison with every variant's own number of steps; None when a signal ended it.

    Raises:
      RefusedError: a pilot failed, sends nothing, or the budget is too small for a period.
    """
    if comparison.config["equal"] not in BUDGETED:
        return comparison
    pilots = {name: _pilot(comparison, name) for name in comparison.variants}
    console.print(f"pilot runs, to know what a step of each costs in {comparison.config['equal']}")
    runs = dataclasses.replace(comparison, runs=tuple(pilots.values()), seeds=comparison.seeds[:1])
    if not run_all(runs, console):
        return None
    failed = [
        f"{name}: its pilot failed: {error_of(run.workdir)}"
        for name, run in pilots.items()
        if not finished(run.workdir)
    ]
    refuse_any(failed, TITLE)
    logs = {name: read_run(run.workdir) for name, run in pilots.items()}
    steps = _steps(comparison, logs)
    for name, count in steps.items():
        console.print(f"  {name}: {count} steps", highlight=False)
    given = [_with_steps(run, steps[run.variant]) for run in comparison.runs]
    return dataclasses.replace(comparison, runs=tuple(given))


def _pilot(comparison: Comparison, name: str) -> RunSpec:
    """A run of a few periods of a variant, evaluated only where it must be."""
    run = next(run for run in comparison.runs if run.variant == name)
    fields = {
        **run.fields,
        "eval": {**run.fields["eval"], "every": 0},
        "checkpoint": {**run.fields["checkpoint"], "every": 0},
    }
    if name not in comparison.growing:
        warmup = min(1, run.fields["inner"]["warmup_steps"])
        fields["steps"] = _PERIODS * _period(run)
        fields["inner"] = {**run.fields["inner"], "warmup_steps": warmup}
    return RunSpec(name, run.seed, fields, comparison.workdir / PILOT / name)


def _period(run: RunSpec) -> int:
    return run.fields["method"].get("period") or 1


def _with_steps(run: RunSpec, steps: int) -> RunSpec:
    return dataclasses.replace(run, fields={**run.fields, "steps": steps})


def _steps(comparison: Comparison, logs: Mapping[str, RunLog]) -> dict[str, int]:
    """Whole periods for every variant; the baseline keeps its own steps."""
    runs = {run.variant: run for run in comparison.runs}
    base = comparison.config["baseline"]
    budget = _cost(comparison, logs[base]).of(runs[base].fields["steps"])
    steps, problems = {base: runs[base].fields["steps"]}, []
    for name, log in logs.items():
        if name == base:
            continue
        if name in comparison.growing:
            steps[name] = max(1, round(_reached(comparison, log, budget)))
            continue
        cost = _cost(comparison, log)
        if cost.per_step <= 0:
            problems.append(f"{name}: it sends nothing, so no number of steps equals the baseline")
            continue
        period = _period(runs[name])
        whole = int((budget - cost.once) / cost.per_step) // period * period
        if whole < period:
            problems.append(
                f"{name}: the baseline's {comparison.config['equal']} are less than one of its "
                f"periods costs: give {base} more steps"
            )
        steps[name] = whole
    refuse_any(problems, TITLE)
    return steps


@dataclasses.dataclass(frozen=True)
class _Cost:
    """Bytes or seconds of a run: `once`, and `per_step`."""

    once: float
    per_step: float

    def of(self, steps: int) -> float:
        return self.once + steps * self.per_step


def _cost(comparison: Comparison, run: RunLog) -> _Cost:
    last = run.end["step"]
    half = last // 2
    at_half, at_last = _spent_at(comparison, run, [half, last])
    per_step = (at_last - at_half) / (last - half)
    return _Cost(at_last + _at_the_end(comparison, run) - last * per_step, per_step)


def _reached(comparison: Comparison, run: RunLog, budget: float) -> float:
    """Nominal steps after which a run whose steps change in cost had spent the budget.

    Steps beyond its end are taken to cost as much as those of its second half.
    """
    steps = [record["step"] for record in run.steps]
    nominal = [0.0, *(nominal_steps(run, record) for record in run.steps)]
    spent = [0.0, *_spent_at(comparison, run, steps)]
    left = budget - _at_the_end(comparison, run)
    if left <= spent[-1]:
        return float(np.interp(left, spent, nominal))
    half = len(spent) // 2
    per_step = (spent[-1] - spent[half]) / (nominal[-1] - nominal[half])
    return nominal[-1] + (left - spent[-1]) / per_step


def _spent_at(comparison: Comparison, run: RunLog, steps: Sequence[int]) -> list[float]:
    """Bytes of a region, or virtual seconds, after each of these steps."""
    if comparison.config["equal"] == "bytes":
        return [mean_sent(run.steps[step - 1]) for step in steps]
    return seconds_at(run, next(iter(comparison.networks.values())), steps)


def _at_the_end(comparison: Comparison, run: RunLog) -> float:
    """Extra cost of the last synchronisation, which the virtual clock does not hold."""
    if comparison.config["equal"] != "bytes":
        return 0.0
    return bytes_at(run)[-1] - mean_sent(run.steps[-1])


def budget_deviation(
    comparison: Comparison, variants: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """By which share each variant missed the baseline's budget; empty if unknown.

    Args:
      variants: name -> row of the result.
    """
    if comparison.config["equal"] not in BUDGETED:
        return {}
    costs = {name: _spent(comparison, row) for name, row in variants.items()}
    base = costs[comparison.config["baseline"]]
    return {name: cost / base - 1 for name, cost in costs.items() if cost and base}


def _spent(comparison: Comparison, row: Mapping[str, Any]) -> float | None:
    if comparison.config["equal"] == "bytes":
        return row["bytes_sent"]
    return row["networks"].get(next(iter(comparison.networks)), {}).get("seconds")
