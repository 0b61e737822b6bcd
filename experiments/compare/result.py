"""Compute the content of compare.json from the metrics files of a comparison's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cli import RefusedError
from experiments.compare.at_equal import at_equal
from experiments.compare.equal import budget_deviation
from experiments.compare.plan import Comparison, error_of, finished
from experiments.report.costs import (
    STEPS,
    costs,
    document_difference,
    keys,
    mean_costs,
    to_target,
)
from experiments.report.runlog import RunLog, from_the_end, nominal_steps, read_run
from experiments.report.stats import estimate, paired, paired_share

VERSION = 2
# Equal bytes: at most this share apart. Fragments need a last synchronisation that DiLoCo, whose
# last round ends with the run, does not.
BYTES_TOLERANCE = 0.1

Logs = dict[str, dict[int, RunLog]]  # variant -> seed -> run


def read_logs(comparison: Comparison) -> tuple[Logs, list[dict[str, Any]]]:
    """(the complete runs of every variant, an entry for each run that failed).

    Raises:
      RefusedError: the runs were not evaluated on the same documents.
    """
    logs: Logs = {name: {} for name in comparison.variants}
    failures = []
    for run in comparison.runs:
        if finished(run.workdir):
            logs[run.variant][run.seed] = read_run(run.workdir)
        else:
            error = error_of(run.workdir) or "not complete"
            failures.append({"variant": run.variant, "seed": run.seed, "error": error})
    _same_documents(logs)
    return logs, failures


def collect(
    comparison: Comparison, logs: Logs, failures: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of compare.json, computed from the metrics files alone."""
    target = _target(comparison, logs)
    variants = {name: _variant(comparison, runs, target) for name, runs in logs.items()}
    # Of one seed there is an interval over documents only; of several, that over seeds says more.
    singles = {n: run for n, by_seed in logs.items() for run in by_seed.values()}
    if len(comparison.seeds) > 1:
        singles = {}
    return {
        "version": VERSION,
        "seeds": list(comparison.seeds),
        **{name: comparison.config[name] for name in ("baseline", "equal")},
        "apart": budget_deviation(comparison, variants),
        "target": target,
        "target_from": "config" if comparison.config["target"] is not None else "baseline",
        "failures": list(failures),
        "variants": variants,
        "networks": list(comparison.networks),
        "step_seconds": comparison.step_seconds,
        "at_equal": at_equal(logs, comparison.networks),
        "panels": [_panel(panel, variants, singles) for panel in comparison.panels],
        "config": comparison.config,
    }


def _same_documents(logs: Logs) -> None:
    runs = [(f"{n} seed {s}", log) for n, by_seed in logs.items() for s, log in by_seed.items()]
    judged = [(log.header["data"]["corpus_digest"], log.eval_count.tolist()) for _, log in runs]
    other = [name for (name, _), found in zip(runs, judged) if found != judged[0]]
    if other:
        fix = "remove their folders and run again"
        problem = f"the corpus has changed between the runs; other than {runs[0][0]}: "
        raise RefusedError([f"{problem}{', '.join(other)}: {fix}"], "cannot compare")


def _target(comparison: Comparison, logs: Logs) -> float | None:
    """The loss to reach: the config's, or the baseline's highest final one over its seeds."""
    if (target := comparison.config["target"]) is not None:
        return target
    finals = [run.evals[-1]["anchor"] for run in logs[comparison.config["baseline"]].values()]
    return max((loss for loss in finals if loss is not None), default=None)


def _variant(comparison: Comparison, runs: Mapping[int, RunLog], target: float | None) -> dict:
    """One variant: every seed, then the means over those that are complete."""
    networks = comparison.networks
    rows = {
        str(seed): {"to_target": to_target(runs[seed], target, networks)}
        | costs(runs[seed], networks)
        for seed in comparison.seeds
        if seed in runs
    }
    reached = [row["to_target"] for row in rows.values()]
    missed = sum(cost[STEPS] is None for cost in reached)
    first = next(iter(runs.values()), None)
    return {
        **{name: first and first.header[name] for name in ("method", "regions", "steps")},
        "runs": rows,
        "to_target": {
            key: {
                **vars(estimate([cost[key] for cost in reached])),
                "not_reached": missed,
            }
            for key in keys(networks)
        },
        **mean_costs(list(rows.values()), len(comparison.seeds)),
        "curve": _curve(list(runs.values())),
    }


def _curve(runs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """The anchor's evaluation loss over the run: all seeds are evaluated at the same steps."""
    points = []
    for records in from_the_end(run.evals for run in runs):
        losses = vars(estimate([record["anchor"] for record in records]))
        tokens = estimate([record["tokens"] for record in records]).mean
        step = nominal_steps(runs[0], records[0])
        points.append({"step": step, "tokens": tokens, **losses})
    return points


def _panel(
    panel: Mapping[str, Any], variants: Mapping[str, dict], singles: Mapping[str, RunLog]
) -> dict:
    base = variants[panel["baseline"]]
    rows = {}
    for name in panel["variants"]:
        here = variants[name]
        loss = paired(_column(here, "loss"), _column(base, "loss"))
        steps = paired_share(_steps(here), _steps(base))
        rows[name] = {
            "loss": _difference(loss) | {"documents_half": _over_documents(name, panel, singles)},
            "steps_to_target": _difference(steps),
        }
    return {
        "title": panel["title"],
        "baseline": panel["baseline"],
        "differences": rows,
        "equal_bytes": panel["equal_bytes"],
        "other_bytes": _other_bytes(panel, variants) if panel["equal_bytes"] else {},
    }


def _over_documents(
    name: str, panel: Mapping[str, Any], singles: Mapping[str, RunLog]
) -> float | None:
    here, there = singles.get(name), singles.get(panel["baseline"])
    if here is None or there is None or here is there:
        return None
    return document_difference(here, there)


def _column(variant: Mapping[str, Any], key: str) -> dict[str, float | None]:
    return {seed: row[key] for seed, row in variant["runs"].items()}


def _steps(variant: Mapping[str, Any]) -> dict[str, float | None]:
    return {seed: row["to_target"][STEPS] for seed, row in variant["runs"].items()}


def _difference(by_seed: Mapping[str, float | None]) -> dict[str, Any]:
    found = estimate(list(by_seed.values()))
    return {**vars(found), "verdict": found.verdict, "by_seed": dict(by_seed)}


def _other_bytes(panel: Mapping, variants: Mapping[str, dict]) -> dict[str, float]:
    """Variants that send more or less than the baseline, as a share of it."""
    sent = variants[panel["baseline"]]["bytes_sent"]
    if not sent:
        return {}
    shares = {
        name: variants[name]["bytes_sent"] / sent - 1
        for name in panel["variants"]
        if variants[name]["bytes_sent"]  # a single region sends nothing
    }
    return {name: share for name, share in shares.items() if abs(share) > BYTES_TOLERANCE}
