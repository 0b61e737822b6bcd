"""Read a run back from its metrics file, and compute the few numbers that tables show.

Takes a work directory, gives a `RunLog` (records by kind); `summarise` makes a `Summary` of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from experiments.cli import RefusedError
from experiments.metrics import checked, evaluated_on, judged_on, read_records
from experiments.report.merged import measure, merged, region_logs
from experiments.shape import Number, misfit
from experiments.workdir import METRICS
from lowcomm_jax.rules.consensus import Consensus, contraction

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RunLog:
    """The records of one run, by kind, in order.

    Attributes:
      evals: those of the set that the last one was of, whose targets by document `eval_count` has.
      missing: regions of a run of jobs whose logs are not there; totals are those of the others.
    """

    name: str
    header: dict[str, Any]
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    intervals: list[dict[str, Any]]
    eval_count: np.ndarray
    end: dict[str, Any] | None
    missing: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Summary:
    """One run in numbers; losses in nats per token, None where nothing was measured.

    Attributes:
      complete: the run has ended, in every region.
      loss, interval: last loss of the anchor, and half the width of its 95 % interval over the
        evaluation documents (`document_interval`).
      best, best_step: lowest loss of the anchor at any evaluation, and its step.
      mean_loss: last loss of the mean of the regions.
      bytes_sent: per region, the mean over the regions whose logs are there (`mean_sent`).
      compression: bytes of AllReduce (fp32 gradients, two-shot, every step) over `bytes_sent`.
      tokens_per_second: median over the steps after the first interval (which compiles).
      staleness: the largest, in inner steps.
      participation: mean share of the regions that exchanges counted.
      skipped: steps that regions skipped, their gradients not being finite, over all regions.
      virtual_seconds, utilisation: on the run's own network, if it was trained with one.
      region_losses: smallest and largest last loss of a single region, where they were evaluated.
      anchor_variance: of the regions' anchors at the last evaluation, where there are several.
      contraction, expected_contraction: factor of the anchors' variance per round (gossip): as
        measured in the groups, and in theory without gradients.
    """

    name: str
    method: str
    step: int
    complete: bool
    loss: float | None
    interval: float | None
    best: float | None
    best_step: int | None
    mean_loss: float | None
    tokens: int
    seconds: float
    bytes_sent: float
    compression: float | None
    tokens_per_second: float | None
    staleness: int | None
    participation: float | None
    virtual_seconds: float | None
    utilisation: float | None
    region_losses: tuple[float, float] | None
    anchor_variance: float | None
    contraction: float | None
    expected_contraction: float | None
    exchanges: int
    skipped: int
    batch: tuple[float, float] | None
    trainers: tuple[int, int] | None
    merges: int | None


class _OfReports(Struct):
    """What tables need of a header, beside what every reader does."""

    params: Number
    tokens_per_step: Number
    allreduce_bytes_per_step: Number


def read_run(workdir: Path) -> RunLog:
    """Read a run, of one process or of one job per region (`launch`).

    Raises:
      RefusedError: no metrics there, or damaged ones.
    """
    path = workdir / METRICS
    regions = [] if path.is_file() else region_logs(workdir)
    if not path.is_file() and not regions:
        raise RefusedError([f"{workdir}: no run lies there ({METRICS} is missing)"], "report")
    try:
        records = merged(regions) if regions else checked(read_records(path), path)
    except ValueError as error:
        raise RefusedError([str(error)], "report") from error
    if not records or records[0]["kind"] != "header":
        raise RefusedError([f"{path} does not start with a header"], "report")
    wrong = misfit(records[0], _OfReports)
    if wrong is not None:
        raise RefusedError([f"{path}, record 1: header: {wrong}"], "report")
    judged = judged_on(records)
    by_kind: dict[str, list] = {}
    for record in evaluated_on(judged, records):
        by_kind.setdefault(record["kind"], []).append(record)
    measure(by_kind.get("step", []))
    all_regions = range(records[0]["regions"]) if regions else ()
    return RunLog(
        name=workdir.name,
        header=records[0],
        steps=by_kind.get("step", []),
        evals=by_kind.get("eval", []),
        intervals=by_kind.get("interval", []),
        eval_count=np.array(judged["count"] if judged else []),
        end=by_kind.get("end", [None])[-1],
        missing=tuple(sorted(set(all_regions) - set(records[0]["here"]))),
    )


def from_the_end(values: Iterable[Sequence[T]]) -> list[tuple[T, ...]]:
    """Values of several runs' evaluations side by side, as many as all have.

    A run that went on with another evaluation set has fewer, and not the first ones.
    """
    return list(zip(*map(reversed, values)))[::-1]


def missing_logs(run: RunLog) -> str | None:
    """A sentence that names the regions whose logs are missing; None = there are none."""
    if not run.missing:
        return None
    return f"logs of regions {list(run.missing)} are missing: totals are of the others"


def mean_sent(record: Mapping[str, Any]) -> float:
    """Bytes sent so far per region, of a step or the end: the mean over regions with a log."""
    return float(np.nanmean(np.array(record["bytes_sent"], float)))


def nominal_steps(run: RunLog, record: Mapping[str, Any]) -> float:
    """Steps of the nominal batch that hold as many tokens; inner steps where batches do not grow.

    Args:
      record: of any kind that has `step` and `tokens`.
    """
    return in_nominal_steps(run.header, record["tokens"]) if adapts(run) else record["step"]


def in_nominal_steps(header: Mapping[str, Any], tokens: float) -> float:
    """Tokens of a log in steps of the nominal batch.

    Args:
      header: of the log. That of one job of several counts the tokens of its own region alone.
    """
    return tokens * header["regions"] / len(header["here"]) / header["tokens_per_step"]


def adapts(run: RunLog) -> bool:
    """Whether batches grow or trainers merge."""
    return bool(run.steps) and adaptive(run.steps[0])


def adaptive(step: Mapping[str, Any]) -> bool:
    """Whether a `step` record is of a run whose batches grow or whose trainers merge."""
    return "trainers" in step


def _growth(run: RunLog) -> dict[str, Any]:
    """The fields of a `Summary` that only such runs have."""
    if not adapts(run):
        return dict.fromkeys(("batch", "trainers", "merges"))
    ends = run.steps[0], run.steps[-1]
    return {
        "batch": tuple(mean_batch(step) for step in ends),
        "trainers": tuple(len(step["trainers"]) for step in ends),
        "merges": sum(len(step.get("merges", [])) for step in run.steps),
    }


def mean_batch(step: Mapping[str, Any]) -> float:
    """Requested batch, the mean over trainers."""
    return float(np.mean([trainer["batch"] for trainer in step["trainers"].values()]))


def exchanges(step: Mapping[str, Any]) -> int:
    """1 if a payload was sent at this step; values that a batch policy sends do not count."""
    return int(any(e["kind"] == "send" and e["fragment"] >= 0 for e in step["events"]))


def summarise(run: RunLog) -> Summary:
    """The numbers of a run, computed from its metrics file alone."""
    last = run.end or (run.steps[-1] if run.steps else {"step": 0, "tokens": 0, "bytes_sent": [0]})
    steps = int(last["step"])
    sent = mean_sent(last)
    allreduce = run.header["allreduce_bytes_per_step"] * nominal_steps(run, last)
    evals = [e for e in run.evals if e["anchor"] is not None]
    best = min(evals, key=lambda e: e["anchor"], default=None)
    final = run.evals[-1] if run.evals else None
    first = run.intervals[0]["step"] if run.intervals else 0
    speeds = [s["tokens_per_second"] for s in run.steps if s["step"] > first] or [
        s["tokens_per_second"] for s in run.steps
    ]
    events = [event for step in run.steps for event in step["events"]]
    measured, expected = _contraction(run, events)
    losses = (final or {}).get("regions")
    stale = [max(e["staleness"]) for e in events if e["kind"] == "land"]
    virtual = last.get("virtual", {})
    shares = [s["participation"] for s in run.steps if s["participation"] is not None]
    return Summary(
        name=run.name,
        method=run.header["method"],
        step=steps,
        complete=run.end is not None and not run.missing,
        loss=final and final["anchor"],
        interval=final
        and document_interval(np.array(final["document_sum"], float), run.eval_count),
        best=best and best["anchor"],
        best_step=best and best["step"],
        mean_loss=final and final["mean_of_regions"],
        tokens=int(last["tokens"]),
        seconds=float(last.get("seconds", 0.0)),
        bytes_sent=sent,
        compression=allreduce / sent if sent else None,
        tokens_per_second=float(np.median(speeds)) if speeds else None,
        staleness=max(stale, default=None),
        participation=float(np.mean(shares)) if shares else None,
        virtual_seconds=virtual.get("wall_s"),
        utilisation=virtual.get("utilisation"),
        region_losses=(min(losses), max(losses)) if losses and None not in losses else None,
        anchor_variance=final and final.get("anchor_variance"),
        contraction=measured,
        expected_contraction=expected,
        exchanges=sum(map(exchanges, run.steps)),
        skipped=sum(int(np.nansum(step.get("skipped", ()))) for step in run.steps),
        **_growth(run),
    )


def _contraction(run: RunLog, events: list[dict]) -> tuple[float | None, float | None]:
    """Of the anchors' variance per round, measured and in theory; None without gossip."""
    if run.header.get("consensus") is None:
        return None, None
    theory = Consensus(**run.header["consensus"])
    pulls = [e["pull_norm"] for e in events if "pull_norm" in e and all(e["participants"])]
    variances = [theory.variance(np.array(pull)) for pull in pulls]
    return contraction(variances), theory.contraction(run.header["regions"])


def document_interval(sum_D: np.ndarray, count_D: np.ndarray) -> float | None:
    """Half the width of the 95 % interval of a loss per token over documents.

    Documents are the units that were drawn; tokens of one document are correlated. The loss is the
    ratio L of two sums over D documents. Its variance is that of a linearised ratio estimator,
    D / (D - 1) sum_d (s_d - L c_d)^2 / (sum_d c_d)^2, with Student's t for D - 1.

    Args:
      sum_D: s, summed loss of each document, nats.
      count_D: c, targets of each document.

    Returns:
      None with fewer than two documents. The interval covers the choice of documents, not that of
      the seed.
    """
    documents = len(count_D)
    if documents < 2 or not np.isfinite(sum_D).all():
        return None
    loss = sum_D.sum() / count_D.sum()
    residual = ((sum_D - loss * count_D) ** 2).sum()
    error = np.sqrt(documents / (documents - 1) * residual) / count_D.sum()
    return half_of_interval(error, documents - 1)


def half_of_interval(error: float, freedom: int) -> float:
    """Half of a 95 % interval by Student's t, from a standard error and degrees of freedom."""
    from scipy import special  # takes 0.15 s of a start, and is needed at its end

    return float(special.stdtrit(freedom, 0.975) * error)
