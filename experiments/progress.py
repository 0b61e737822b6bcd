"""Show the progress of one run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import re
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text


@dataclasses.dataclass
class Now:
    """The present state of a run; `eval_loss` and `seconds_left` are None until known.

    `skipped`: steps that regions skipped, their gradients not being finite, over all regions.
    """

    step: int
    steps: int
    loss: float
    eval_loss: float | None
    tokens_per_second: float
    bytes_sent: float
    seconds_left: float | None
    skipped: int = 0

    def numbers(self) -> str:
        parts = [f"loss {self.loss:.3f}"]
        if self.eval_loss is not None:
            parts.append(f"eval {self.eval_loss:.3f}")
        parts += [f"{self.tokens_per_second:,.0f} tokens/s", f"{size(self.bytes_sent)} sent/region"]
        if self.skipped:
            parts.append(f"{self.skipped:,} steps skipped")
        return "  ".join(parts)

    def left(self) -> str:
        return "" if self.seconds_left is None else f"{duration(self.seconds_left)} left"

    def line(self) -> str:
        return f"step {self.step}/{self.steps}  {self.numbers()}  {self.left()}".rstrip()


def steps_of(line: str) -> tuple[int, int] | None:
    """(step, steps of the run) from a line of `Now.line`; None for any other line."""
    found = re.match(r"step (\d+)/(\d+) ", line)
    return (int(found[1]), int(found[2])) if found else None


class Display(Protocol):
    """Shows progress until it is closed."""

    def update(self, now: Now) -> None: ...

    def close(self) -> None: ...


def open_display(console: Console, steps: int, quiet: bool) -> Display:
    """A live line in a terminal, one line per log interval otherwise; `quiet` shows neither."""
    if quiet:
        return _Silent()
    return _Live(console, steps) if console.is_terminal else _Plain(console)


class _Live:
    """A bar and, below it, the numbers: both fit a narrow terminal."""

    def __init__(self, console: Console, steps: int):
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(None),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("train", total=steps, left="")
        self._numbers = Text("compiling ...")
        self._live = Live(
            Group(self._progress, self._numbers), console=console, refresh_per_second=4
        )
        self._live.start()

    def update(self, now: Now) -> None:
        self._numbers.plain = now.numbers()
        self._progress.update(self._task, completed=now.step, left=now.left())

    def close(self) -> None:
        self._live.stop()


class _Plain:
    def __init__(self, console: Console):
        self._console = console

    def update(self, now: Now) -> None:
        self._console.print(now.line(), highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class _Silent:
    def update(self, now: Now) -> None:
        pass

    def close(self) -> None:
        pass


def size(count: float) -> str:
    """Bytes for people: 12.3 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable: TB takes everything")


def duration(seconds: float) -> str:
    """Seconds for people: 42 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def thousands(value: float, _=None) -> str:
    """A count for people, also as a formatter of an axis: 12k, 3M."""
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{unit}"
    return f"{value:g}"
