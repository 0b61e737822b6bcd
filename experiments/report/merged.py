"""Merge the logs of one job per region into the log that a single process would write."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.metrics import checked, evaluated_on, judged_on, read_records
from experiments.workdir import METRICS

_FOLDER = re.compile(r"region(\d+)")
# Fields in which every region records only itself: lists of one entry, which are concatenated.
_OWN = ("loss", "grad_norm", "skipped", "ce", "accuracy", "work")
# Of an event, and what stands there for a region that has not seen it. Whether a region whose log
# is missing took part is not known: None.
_EVENT_OWN = {
    "participants": False,
    "staleness": -1,
    "bytes_sent": 0,
    "bytes_received": 0,
    "delta_norm": math.nan,
    "left_out": 0.0,
    "codec_error": math.nan,
    "sent_share": math.nan,
    "weight": 0.0,
    "correction_ratio": math.nan,
    "pull_norm": math.nan,
    "travel_seconds": math.nan,
    "waited_seconds": math.nan,
}


def region_logs(workdir: Path) -> list[Path]:
    """Metrics files of the regions of a run of jobs, in order; empty if it is none."""
    found = {}
    for folder in workdir.glob("region*"):
        number = _FOLDER.fullmatch(folder.name)
        if number and (folder / METRICS).is_file():
            found[int(number.group(1))] = folder / METRICS
    return [found[region] for region in sorted(found)]


def merged(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Records of one run from those of its regions.

    A step's record has a row for every region, NaN for those that did not make the step (`present`
    says which did). Its tokens and bytes are those of all regions so far. A region whose log is
    missing (not in the header's `here`) has bytes of NaN, no tokens, and None for its part in an
    exchange; shares are of the other regions. The record `end` is there once every log has one, so
    that a run which lost a region for good has its totals.

    Evaluations and intervals are those of the lowest region that has them and was not behind
    (`SyncCounters.behind`), since anchors are the same everywhere. With gossip anchors differ, and
    no region knows by how much. Of another set than the first log's last one there are none.

    Raises:
      ValueError: a file is damaged, or a record lacks what every one of its kind has.
    """
    logs = [_in_their_steps(checked(read_records(path), path)) for path in paths]
    logs = [log for log in logs if log]
    if not logs:
        return []
    for path, (first, *_) in zip(paths, logs):
        if first["kind"] != "header":
            raise ValueError(f"{path} does not start with a header")
    here = [region for log in logs for region in log[0]["here"]]
    if len(here) > len(logs) or len(set(here)) < len(here):
        raise ValueError(f"{paths[0].parents[1]}: logs of regions {here}, not one a folder")
    header = {**logs[0][0], "here": here}
    steps: dict[int, dict[int, dict]] = {}
    others: dict[tuple[str, int], dict] = {}
    ends: dict[int, dict] = {}
    judged = judged_on(logs[0])
    for log in logs:
        region = log[0]["here"][0]
        for record in evaluated_on(judged, log[1:]):
            kind = record["kind"]
            if kind == "step":
                steps.setdefault(record["step"], {})[region] = record
            elif kind == "end":
                ends[region] = record
            elif kind != "eval_set":
                record.pop("anchor_variance", None)
                before = others.setdefault((kind, record.get("step", -1)), record)
                if record.get("behind", 0) < before.get("behind", 0):
                    others[kind, record["step"]] = record
    totals = _Totals(range(header["regions"]), here)
    records = [totals.step(steps[number]) for number in sorted(steps)]
    tokens = {record["step"]: record["tokens"] for record in records}
    for (kind, number), record in others.items():
        if kind == "eval" and number in tokens:  # a region counts its own tokens alone
            record["tokens"] = tokens[number]
    end = [totals.end(ends)] if len(ends) == len(logs) else []
    order = {"step": 1, "interval": 2, "eval": 3}
    body = sorted(
        [*others.values(), *records],
        key=lambda r: (r.get("step", -1), order.get(r["kind"], 4)),
    )
    return [header, *([judged] if judged else []), *body, *end]


def _in_their_steps(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A region's records, with deferred events at the steps of the other regions."""
    steps = {record["step"]: record for record in log if record["kind"] == "step"}
    for step, record in steps.items():
        off = [e for e in record["events"] if e["step"] != step and e["step"] in steps]
        if not off:
            continue
        record["events"] = [event for event in record["events"] if event not in off]
        for event in off:
            then = steps[event["step"]]
            then["events"].append(event)
            if event["kind"] == "send":
                # A deferred send has no sender in this log.
                then["participation"] = 0.0
    return log


class _Totals:
    """Sums over a run, region by region; those of a lost region stay as they were.

    Args:
      regions: of the run.
      here: those that have a log.
    """

    def __init__(self, regions: Sequence[int], here: Sequence[int]):
        self._regions, self._here = list(regions), set(here)
        self._last: dict[int, dict] = {}

    def _sum(self) -> dict[str, Any]:
        def column(name: str) -> list[float]:
            none = {r: 0 if r in self._here else math.nan for r in self._regions}
            return [self._last[r][name][0] if r in self._last else none[r] for r in self._regions]

        return {
            "tokens": sum(record["tokens"] for record in self._last.values()),
            "bytes_sent": column("bytes_sent"),
            "bytes_received": column("bytes_received"),
        }

    def step(self, found: Mapping[int, dict]) -> dict[str, Any]:
        """One step's record from the regions' (region -> record)."""
        self._last |= found
        rows = list(found.values())
        record = {**rows[0], **self._sum()}
        for name in [name for name in _OWN if name in rows[0]]:
            none = 0.0 if name == "skipped" else math.nan
            own = [found[r][name][0] if r in found else none for r in self._regions]
            # A log has null where a number was not finite.
            record[name] = [math.nan if x is None else x for x in own]
        if "trainers" in record:
            record["trainers"] = _trainers(rows)
        record["present"] = [r in found for r in self._regions]
        losses = [x for x in record["loss"] if not math.isnan(x)]
        record["loss_mean"] = float(np.mean(losses)) if losses else math.nan
        record["tokens_per_second"] = sum(row["tokens_per_second"] or 0.0 for row in rows)
        record["seconds"] = max(row["seconds"] for row in rows)
        shares = [r["participation"] for r in rows if r["participation"] is not None]
        # Of all regions with a log: those that were away took no part, and have no row here.
        record["participation"] = sum(shares) / len(self._here) if shares else None
        record["events"] = self._events(found)
        return record

    def _events(self, found: Mapping[int, dict]) -> list[dict[str, Any]]:
        """The regions' views of a step's sends and landings, side by side."""
        views: dict[tuple, dict[int, dict]] = {}
        for region, row in found.items():
            for event in row["events"]:
                name = (event["kind"], exchange_of(event), event["fragment"])
                views.setdefault(name, {})[region] = event
        return [self._event(own) for own in views.values()]

    def _event(self, views: Mapping[int, dict]) -> dict[str, Any]:
        # A region that was late has sent no anchor ahead.
        one = max(views.values(), key=lambda event: event.get("ahead", 0))
        found = one | {
            name: [views[r][name][0] if r in views else empty for r in self._regions]
            for name, empty in _EVENT_OWN.items()
            if name in one
        }
        took_part = zip(self._regions, found["participants"])
        found["participants"] = [took if r in self._here else None for r, took in took_part]
        return found

    def end(self, ends: Mapping[int, dict]) -> dict[str, Any]:
        """The record of the run's end from those of its regions (region -> record)."""
        self._last |= ends
        rows = list(ends.values())
        return {**rows[0], **self._sum(), "seconds": max(row["seconds"] for row in rows)}


def _trainers(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every trainer's values of a step; its loss is the mean of the regions' losses."""

    def mean(number: str) -> float:
        own = [row["trainers"][number]["loss"] for row in rows if number in row["trainers"]]
        finite = [x for x in own if x is not None]  # as a log has what was not finite
        return float(np.mean(finite)) if finite else math.nan

    return {n: one | {"loss": mean(n)} for n, one in rows[0]["trainers"].items()}


def measure(steps: Sequence[dict[str, Any]]) -> None:
    """Replace the participation of steps by the share of the regions that was counted.

    A job that sends does not know yet whether the others will count it: its log has 1 for a payload
    that came too late, or to nobody. The payload's landing has what the commit record says.

    Args:
      steps: records of the jobs of a run, or of one of them; changed in place. Payloads that have
        not landed stay as they were sent, as do the records of a run in one process.
    """
    found = counted(steps)
    for step in steps if found else ():
        sends = [e for e in step["events"] if e["kind"] == "send" and e["fragment"] >= 0]
        if sends:
            step["participation"] = float(np.mean([_share(send, found) for send in sends]))


def counted(steps: Sequence[Mapping[str, Any]]) -> dict[Any, list[bool | None]]:
    """The exchange of every payload that has landed -> the regions whose payloads counted.

    The commit record names them, and the guards did not leave them out. None = not known, since the
    region's log is missing.
    """
    named: dict[Any, Sequence[bool | None]] = {}
    out: dict[Any, list[bool]] = {}
    for step in steps:
        for event in step["events"]:
            name = exchange_of(event)
            if event["kind"] == "land" and "travel_seconds" in event:
                named[name] = event.get("admitted", event["participants"])
            elif event["kind"] == "send" and event.get("left_out"):
                new = [bool(x) for x in event["left_out"]]
                # Regions at a pace of their own send a round at different steps.
                out[name] = [a or b for a, b in zip(out.get(name, new), new, strict=True)]
    return {name: _but(took, out.get(name, ())) for name, took in named.items()}


def _but(took: Sequence[bool | None], left_out: Sequence[bool]) -> list[bool | None]:
    if len(left_out) < len(took):  # the log of one job of a round that names all admitted
        left_out = [False] * len(took)
    return [t if t is None else bool(t) and not out for t, out in zip(took, left_out)]


def exchange_of(event: Mapping[str, Any]) -> Any:
    """What names its exchange in all regions: its round, where they have no steps in common."""
    return event.get("trainer"), event.get("round", event["key"])


def _share(send: Mapping[str, Any], found: Mapping[Any, Sequence[bool | None]]) -> float:
    if send.get("round") == -1:
        return 0.0  # an arrival that found no round
    took = found.get(exchange_of(send))
    if took is None:
        took = _but(send["participants"], send.get("left_out") or ())
    return sum(map(bool, took)) / sum(t is not None for t in took)
