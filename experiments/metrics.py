"""metrics.jsonl: everything a run measured, one JSON record a line (docs/metrics.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import defstruct

from experiments.shape import Count, Number, misfit
from experiments.workdir import write_whole

T = TypeVar("T", bound=Mapping[str, Any])
_BYTES = {"bytes_sent": list[Number], "bytes_received": list[Number]}
_EVENT = defstruct("event", [("kind", str), ("fragment", int), ("participants", list)])
# What every reader of a run needs of its records, by their kind.
_RUN = {
    kind: defstruct(kind, fields.items())
    for kind, fields in {
        "header": {
            "method": str,
            "config": dict,
            "data": dict,
            "steps": Count,
            "regions": Count,
            "here": list[int],
        },
        "step": {
            "step": int,
            "tokens": Number,
            "seconds": Number,
            "tokens_per_second": Number | None,
            "loss": list[Number | None],
            **_BYTES,
            "events": list[_EVENT],
        },
        "eval": {"step": int, "tokens": Number, "anchor": Number | None},
        "interval": {"step": int, "steps": int, "seconds": Number},
        "eval_set": {"count": list[Number]},
        "end": {"step": int, "tokens": Number, **_BYTES},
    }.items()
}
_OF_REGIONS = ("loss", "bytes_sent", "bytes_received")
MEASURED = ("step", "eval")  # kinds of records that other writers take


def judged_on(records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The `eval_set` of the last evaluation: a run may go on with another set.

    Losses of two sets are not compared. Without evaluations it is the last set, if there is one.
    """
    newest = judged = None
    for record in records:
        if record["kind"] == "eval_set":
            newest = record
        elif record["kind"] == "eval":
            judged = newest
    return judged or newest


def evaluated_on(judged: Mapping[str, Any] | None, records: Iterable[T]) -> Iterator[T]:
    """The records without evaluations of another `eval_set` than this one, in their order."""
    newest = None
    for record in records:
        newest = record if record["kind"] == "eval_set" else newest
        if record["kind"] != "eval" or newest == judged:
            yield record


class Writer(Protocol):
    """Takes numbers as they are measured."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record of kind step or eval."""

    def sync(self) -> None:
        """Return once what a kill would take is where it was sent, or will be sent again."""

    def close(self) -> None:
        """Return once everything is written."""


class MetricsLog:
    """Appends records to a run's metrics file, and hands numbers on to other writers.

    Opened at a step, it first drops every record of a later step, so that a run that continues
    from a checkpoint writes no step twice.

    Attributes:
      writers: take the records of kind step and eval, too.
      begun: records of an earlier start were kept.
      newest: the last step record among them, or None.
      eval_set: the last record of that kind among them, or None.
    """

    def __init__(self, path: Path, step: int):
        self.begun, self.newest, self.eval_set = False, None, None
        if path.is_file():
            kept = [r for r in read_records(path) if r.get("step", 0) <= step]
            # The end belongs to the last step: a run that goes on has not ended.
            kept = [r for r in kept if r["kind"] != "end"]
            write_whole(path, "".join(encoded(r) + "\n" for r in kept))
            last = {r["kind"]: r for r in kept}
            self.begun = bool(kept)
            self.newest, self.eval_set = last.get("step"), last.get("eval_set")
        self._file = path.open("a", encoding="utf-8")
        self.writers: list[Writer] = []

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records, each with its `kind`."""
        records = list(records)
        try:
            self._file.writelines(encoded(record) + "\n" for record in records)
            self._file.flush()
        except OSError as error:  # which does not say where
            raise OSError(error.errno, error.strerror, self._file.name) from error
        for record in (r for r in records if r["kind"] in MEASURED):
            for writer in self.writers:
                writer.write(record)

    def sync(self) -> None:
        """Return once everything written is on disk (before a checkpoint relies on it)."""
        self._file.flush()
        os.fsync(self._file.fileno())
        for writer in self.writers:
            writer.sync()

    def close(self) -> None:
        self._file.close()
        for writer in self.writers:
            writer.close()


def encoded(value: Any) -> str:
    """JSON of nested data in one line; it has no NaN and no infinity, they become null."""
    return msgspec.json.encode(value, enc_hook=lambda scalar: scalar.item()).decode()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a file; a last line cut off by a crash is left out.

    Raises:
      ValueError: a line that is no record, other than a last one that was cut off.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is no text file ({error})") from error
    records = []
    for place, line in enumerate(lines, 1):
        try:
            records.append(record_of(line, f"{path}, line {place}"))
        except CutOffError:
            if place < len(lines):
                raise
    return records


class CutOffError(ValueError):
    """A line that is no JSON: cut off by a crash, or damaged."""


def record_of(line: str, where: str) -> dict[str, Any]:
    """The record of one line.

    Raises:
      CutOffError: it is no JSON.
      ValueError: it is no record, since it has no field kind.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise CutOffError(f"{where}: not a JSON record ({error})") from error
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply for a record") from None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError(f"{where}: no record, since it has no field kind")
    return record


def checked(records: Iterable[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The records of a run, each with what every reader needs.

    Raises:
      ValueError: one lacks a field, or has one of another kind; names it.
    """
    records, regions = list(records), None
    for place, record in enumerate(records, 1):
        wrong = misfit(record, _RUN.get(record["kind"], dict))
        if wrong is None and record["kind"] == "header":
            regions = len(record["here"])
        elif wrong is None and record["kind"] == "step" and regions is not None:
            short = [name for name in _OF_REGIONS if len(record[name]) != regions]
            wrong = f"no {short[0]} of {regions} regions" if short else None
        if wrong is not None:
            raise ValueError(f"{path}, record {place}: {record['kind']}: {wrong}")
    return records


def truncated(path: Path) -> bool:
    """Whether the last line of a file was cut off."""
    return path.is_file() and not path.read_bytes().endswith(b"\n")
