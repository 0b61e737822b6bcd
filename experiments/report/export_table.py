"""Export runs for other programs: a CSV with one number a row, or a JSON with all records."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.metrics import encoded
from experiments.report.runlog import RunLog, summarise

COLUMNS = ("run", "kind", "step", "tokens", "region", "metric", "value")
_KEYS = ("kind", "step", "tokens")


def write_csv(runs: Mapping[str, RunLog], path: Path) -> None:
    """Write every number that was measured, one a row (it loads as a long data frame).

    `kind` is step, eval, interval or end; `region` is empty for numbers of all regions together.
    Events and merges are not in it: they are in the JSON, and in the runs' metrics.jsonl.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for name, run in runs.items():
            for record in (*run.steps, *run.evals, *run.intervals, *([run.end] if run.end else [])):
                for region, metric, value in numbers(record, run.header["here"]):
                    where = (record.get(key, "") for key in _KEYS)
                    table.writerow([name, *where, region, metric, value])


def write_json(runs: Mapping[str, RunLog], path: Path) -> None:
    """Write summaries and all records of the runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        name: {
            "summary": dataclasses.asdict(summarise(run)),
            **{name: getattr(run, name) for name in ("header", "missing", "steps", "evals", "end")},
        }
        for name, run in runs.items()
    }
    path.write_text(encoded({"runs": found}) + "\n", encoding="utf-8")


def numbers(
    record: Mapping[str, Any], here: Sequence[int], prefix: str = ""
) -> Iterator[tuple[Any, str, Any]]:
    """(region or empty, metric, value) of every number of a record; lists are by region.

    Args:
      here: numbers of the regions that the log is about.
    """
    for key, value in record.items():
        if key in _KEYS or key in ("events", "merges", "document_sum"):
            continue
        name = prefix + key
        if isinstance(value, Mapping):
            yield from numbers(value, here, f"{name}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from ((r, name, entry) for r, entry in zip(regions_of(value, here), value))
        elif isinstance(value, int | float):
            yield "", name, value


def regions_of(values: Sequence[Any], here: Sequence[int]) -> Sequence[int]:
    """Which region each entry of a list belongs to.

    Merged logs have an entry for every region, also where the log of one is missing.

    Args:
      here: numbers of the regions that the log is about.
    """
    return here if len(here) == len(values) else range(len(values))
