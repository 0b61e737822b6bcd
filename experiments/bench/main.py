"""Measure speed: bench engine, bench codec, ...; each compares within one run.

python -m experiments bench engine --help

What fails is named, and the others are measured all the same; the exit code is then 1.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl.flags import FlagValues
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.cli import Flags, RefusedError, closest, refuse_any
from experiments.progress import duration, plain_console, print_table, right, say, tracked
from experiments.train.header import machine, versions

NAMES = ("engine", "codec", "gpu")
SAID = 300  # letters of a failure's text
Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run `experiments/bench/NAME.py`; returns its exit code."""
    if list(argv) in ([], ["--help"]):
        print((__doc__ or "") + "\nBenchmarks: " + ", ".join(NAMES))
        return 0
    name, *rest = argv
    if name not in NAMES:
        raise RefusedError([f"unknown benchmark {name!r}{closest(name, NAMES)}"], "bench")
    return importlib.import_module(f"experiments.bench.{name}").main(rest)


class NotHereError(Exception):
    """This machine lacks what a measurement needs."""


@dataclasses.dataclass(frozen=True)
class BenchTable:
    """A stage of a benchmark: its parts, and the table of their rows.

    Attributes:
      parts: names, each with what measures its rows.
      columns: headings, each with what gives a row's cell; the first cells are names.
      title: gives the table's title from its rows.
    """

    parts: Iterable[tuple[str, Callable[[], list[Row]]]]
    columns: Sequence[tuple[str, Callable[[Row], str]]]
    title: Callable[[Sequence[Row]], str]


@dataclasses.dataclass
class _Record:
    """What was found so far; once there are rows it is written whenever something is added."""

    path: str | None
    header: Row
    rows: list[Row] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def refuse_unwritable(self, title: str) -> None:
        """Raise a `RefusedError` where the file cannot be written; what it holds stays."""
        if self.path is None:
            return
        file = Path(self.path)
        there = file.exists()
        try:
            file.open("a").close()
        except OSError as error:
            refuse_any([f"--json={file}: {error.strerror}; choose another file"], title)
        if not there:
            file.unlink()

    def write(self) -> None:
        if self.path is not None:
            found = {name: x for name, x in vars(self).items() if name != "path"}
            text = json.dumps({"machine": machine(), "versions": versions(), **found}, indent=1)
            Path(self.path).write_text(text + "\n", encoding="utf-8")


def flags(repeats: int, seconds: int | None = None, json: str | None = None) -> Flags:
    """The flags that every benchmark has, with its own defaults."""
    options = Flags()
    options.whole(
        "seconds", seconds, "time limit: what would not end within it is not begun, and named"
    )
    options.whole("repeats", repeats, "timed runs of each figure")
    options.text("json", json, "file of all figures")
    return options


def run(title: str, stages: Mapping[str, BenchTable], values: FlagValues, **header: Any) -> int:
    """Measure the stages until the time is up; returns the exit code, 1 where a part failed.

    Args:
      title: the command.
      values: of `flags`, which the header gets.
      header: what else decides the figures, beside the machine and its versions.

    Raises:
      RefusedError: the file cannot be written.
    """
    given = {name: values[name].value for name in values if name not in ("help", "h", "json")}
    record, console = _Record(values.json, given | header), plain_console()
    record.refuse_unwritable(title)
    shown = {name: x for name, x in record.header.items() if x not in (None, "", {})}
    say(console, ", ".join(f"{name}: {x}" for name, x in shown.items()))
    seconds = math.inf if values.seconds is None else values.seconds
    until, taken = time.monotonic() + seconds, []
    for name, stage in stages.items():
        # A stage's first part is taken to last as long as those before it, in the mean.
        found, own, mean = [], [], sum(taken) / max(len(taken), 1)
        for part, measure in tracked(stage.parts, title, lambda item: item[0]):
            label, begun = f"{name}: {part}", time.monotonic()
            if until - begun <= max(own, default=mean):
                record.left_out[label] = f"not reached in {duration(seconds)}"
                continue
            if seconds < math.inf:
                say(console, f"{duration(until - begun)} left  {label}")
            try:
                found += measure()
            except NotHereError as error:
                record.left_out[label] = str(error)
            except Exception as error:  # the others are to be measured all the same
                why = " ".join(str(error).split())
                record.failed[label] = f"{type(error).__name__}: {why[:SAID]}"
                say(console, f"failed: {label}: {record.failed[label]}")
            gc.collect()  # an error's frames held the arrays of its part
            own.append(time.monotonic() - begun)
            record.rows = [row for row in record.rows if row["stage"] != name]
            record.rows += [{"stage": name, **row} for row in found]
            if record.rows:  # before that the file keeps what an earlier call has found
                record.write()
        taken += own
        if found:
            show(stage, found, console)
    written = values.json is not None and (bool(record.rows) or not Path(values.json).exists())
    if written:
        record.write()
    say(console, *(f"{label}: {why}" for label, why in record.left_out.items()))
    if written:
        say(console, f"all figures: {values.json}")
    return 1 if record.failed else 0


def show(stage: BenchTable, rows: Sequence[Row], console: Console) -> None:
    """Print a stage's table."""
    (first, _), *rest = stage.columns
    table = Table(
        first,
        *right(heading for heading, _ in rest),
        title=stage.title(rows),
        box=box.SIMPLE_HEAD,
        padding=0,
        collapse_padding=True,
    )
    for row in rows:
        table.add_row(*(cell(row) for _, cell in stage.columns))
    print_table(console, table)
