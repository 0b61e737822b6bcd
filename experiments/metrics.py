"""metrics.jsonl: everything a run measured, one JSON record a line (docs/metrics.md)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VERSION = 1


class MetricsLog:
    """Appends records to a run's metrics file.

    Opened at a step, it first drops every record of a later step, so that a run that continues
    from a checkpoint writes no step twice.

    Attributes:
      begun: records of an earlier start were kept.
      newest: the last step record among them, or None.
    """

    def __init__(self, path: Path, step: int):
        self.begun, self.newest = False, None
        if path.is_file():
            kept = [r for r in read_records(path) if r.get("step", 0) <= step]
            # The end belongs to the last step: a run that goes on has not ended.
            kept = [r for r in kept if r["kind"] != "end"]
            whole = path.with_suffix(".tmp")
            whole.write_text("".join(_line(r) for r in kept), encoding="utf-8")
            whole.replace(path)
            steps = (r for r in reversed(kept) if r["kind"] == "step")
            self.begun, self.newest = bool(kept), next(steps, None)
        self._file = path.open("a", encoding="utf-8")

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records, each with its `kind`."""
        try:
            self._file.writelines(_line(record) for record in records)
            self._file.flush()
        except OSError as error:  # which does not say where
            raise OSError(error.errno, error.strerror, self._file.name) from error

    def sync(self) -> None:
        """Return once everything written is on disk (before a checkpoint relies on it)."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(strict(record), allow_nan=False, separators=(",", ":")) + "\n"


def strict(value: Any) -> Any:
    """Plain JSON of nested data: it has no NaN and no infinity, they become null."""
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{where}: not a JSON record ({error})") from error
            continue
        except RecursionError:
            raise ValueError(f"{where}: nested too deeply for a record") from None
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            raise ValueError(f"{where}: no record, since it has no field kind")
        records.append(record)
    return records


def truncated(path: Path) -> bool:
    """Whether the last line of a file was cut off."""
    return path.is_file() and not path.read_bytes().endswith(b"\n")
