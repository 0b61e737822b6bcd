"""Show how far work is: a live line in a terminal, plain lines elsewhere.

`open_display` is for the steps of a run. `Work` is for all other work that may take long; it is
shown on stderr, so that tables and JSON on stdout stay what they are. `say`, `right` and
`print_table` are for the lines and tables on stdout, which is a `plain_console`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Protocol, Self, TypeVar

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

PLAIN_SECONDS = 10  # between two lines of work where there is no terminal
NAME_WIDTH, NARROW = 24, 8  # letters of a name on one line: at most, and where room is scarce
HEADING_WIDTH = 12  # a longer word of a heading may be broken
T = TypeVar("T")


@dataclasses.dataclass
class Now:
    """The present state of a run; `eval_loss` and `seconds_left` are None until known.

    `eval_step`: the step that `eval_loss` was measured at.
    `mfu`: useful arithmetic as a share of the devices' peak; None where the peak is not known.
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
    eval_step: int = 0
    mfu: float | None = None

    def numbers(self) -> str:
        parts = [f"loss {self.loss:.3f}"]
        if self.eval_loss is not None:
            parts.append(f"eval {self.eval_loss:.3f} at step {self.eval_step}")
        share = "" if self.mfu is None else f" ({self.mfu:.1%} MFU)"
        parts.append(f"{self.tokens_per_second:,.0f} tokens/s{share}")
        parts.append(f"{size(self.bytes_sent)} sent/region")
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
    if console.is_terminal and not quiet:
        return _Live(console, steps)
    shown = functools.partial(say, Console(quiet=True) if quiet else console)
    shown("compiling ...")  # until the first evaluation, and steps
    return Lines(shown)


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


class Lines:
    """A run's numbers as lines of text, which `show` takes."""

    def __init__(self, show: Callable[[str], None]):
        self._show = show

    def update(self, now: Now) -> None:
        self._show(now.line())

    def close(self) -> None:
        pass


class LiveLines:
    """The newest line of each of several runs, by name, in a terminal; it goes when it is closed.

    Elsewhere every new line is printed. A context.

    Attributes:
      live: whether `console` is a terminal.
      heading: called for the line above them.
    """

    def __init__(self, console: Console, heading: Callable[[], str] | None = None):
        self.console, self.heading, self.live = console, heading, console.is_terminal
        self._lines: dict[str, str] = {}
        self._live = Live(
            console=console, refresh_per_second=4, transient=True, get_renderable=self._shown
        )
        if self.live:
            self._live.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._live.stop()

    def _shown(self) -> Text:
        lines = [] if self.heading is None else [self.heading()]
        lines += [f"{name:14} {line}" for name, line in self._lines.copy().items()]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def say(self, name: str, line: str) -> None:
        """Replace the line of `name`."""
        if self._lines.get(name) == line:
            return
        self._lines[name] = line
        if not self.live:
            self.print(f"{name:14} {line}")

    def end(self, name: str) -> None:
        """Take the line of `name` away."""
        self._lines.pop(name, None)

    def print(self, text: str) -> None:
        """A line that stays."""
        say(self.console, text)


class Work:
    """Shows how many parts of a piece of work are done, and the time to go; a context.

    In a terminal a bar, which goes when the work ends; elsewhere a line now and then, and none of
    work that ends within `PLAIN_SECONDS`. Work inside of other work has a bar of its own. The parts
    left are taken to last as long as those that are done, unless `seconds_left` is told.

    Args:
      what: the work, in a few words.
      total: number of parts; None = not known.
      console: where it is shown; None = stderr.
      quiet: show nothing.
    """

    _open: ClassVar[list[Work]] = []

    def __init__(
        self,
        what: str,
        total: int | None = None,
        console: Console | None = None,
        quiet: bool = False,
    ):
        self.what, self.total, self.done = what, total, 0
        self._console, self._quiet = console or plain_console(stderr=True), quiet
        self._started = self._told = time.monotonic()
        self._before = 0  # parts done when the clock was started
        self._bars: Progress | None = None
        self._bar = None

    def __enter__(self) -> Work:
        if self._quiet:
            return self
        if self._console.is_terminal:
            outer = next((work._bars for work in self._open if work._bars is not None), None)
            self._bars = outer or self._new_bars()
            self._bar = self._bars.add_task(self.what, total=self.total, now="", left="")
        self._open.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._quiet:
            return
        self._open.remove(self)
        if self._bars is None:
            return
        self._bars.remove_task(self._bar)
        if not any(work._bars is self._bars for work in self._open):
            self._bars.stop()

    def _new_bars(self) -> Progress:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[now]}"),
        )
        # What is printed meanwhile stands above the bars; but a file or a pipe keeps its stdout.
        bars = Progress(
            *columns,
            console=self._console,
            transient=True,
            refresh_per_second=2,  # benchmarks run meanwhile
            redirect_stdout=sys.stdout.isatty(),
        )
        bars.start()
        return bars

    def at(
        self,
        now: str,
        done: int,
        total: int | None = None,
        seconds_left: float | None = None,
    ) -> None:
        """So many parts are done, of `total` where it is told, and `now` comes next."""
        if done < self.done:  # other parts than before
            self._started, self._before, self.total = time.monotonic(), done, None
        self.done, self.total = done, self.total if total is None else total
        if self._quiet:
            return
        left = self._left(seconds_left)
        if self._bars is not None:
            self._bars.update(self._bar, completed=done, total=self.total, now=now, left=left)
        elif time.monotonic() - self._told >= PLAIN_SECONDS:
            self._told = time.monotonic()
            of = "" if self.total is None else f"/{self.total}"
            line = "  ".join(filter(None, (f"{self.what}: {done}{of}", left, now)))
            say(self._console, line)

    def _left(self, seconds: float | None) -> str:
        if seconds is None and self.done > self._before and self.total is not None:
            a_part = (time.monotonic() - self._started) / (self.done - self._before)
            seconds = a_part * max(self.total - self.done, 0)
        return "" if seconds is None else f"{duration(seconds)} left"


def tracked(
    items: Iterable[T],
    what: str,
    name: Callable[[T], str] = lambda item: "",
) -> Iterator[T]:
    """Yield the items, each a part of the work `what`; `name` names the one that comes next."""
    items = list(items)
    with Work(what, len(items)) as work:
        for number, item in enumerate(items):
            work.at(name(item), number)
            yield item


def plain_console(**how: Any) -> Console:
    """A console that prints texts and cells of tables as they are: names may hold brackets, `:x:`.

    Args:
      how: other arguments of `Console`.
    """
    return Console(markup=False, emoji=False, **how)


def say(console: Console, *lines: str) -> None:
    """Print lines as they are: no markup, no signs, no colours; folded by the terminal alone."""
    for line in lines:
        console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


def right(headings: Iterable[str], **how: Any) -> list[Column]:
    """Columns of a table whose cells lie to the right; `how`: other fields of `Column`."""
    return [Column(heading, justify="right", **how) for heading in headings]


def print_table(console: Console, table: Table, names: int = 0) -> None:
    """Print a table in which no number is cut off or broken.

    Columns are narrowed to the width of the console, and cells are broken between words alone.
    Names and long words of headings are broken anywhere. A table that does not fit even so is
    wider than the console.

    Args:
      table: of text; its columns get a width.
      names: how many of the first columns hold names: they get `NAME_WIDTH` letters at most.
    """
    widths, whole, least = [], [], []
    for number, column in enumerate(table.columns):
        heading, *cells = [str(cell) for cell in (column.header, *column.cells)]
        words, longest = " ".join(cells).split(), _widest(heading, *cells)
        if number < names:
            longest = max(min(longest, NAME_WIDTH), _widest(*filter(_is_number, words)))
        head = min(_widest(*heading.split()), HEADING_WIDTH)
        whole.append(max(1, head, min(_widest(*words), longest)))
        least.append(whole[-1])
        if number < names:
            least[-1] = max(NARROW, _widest(*filter(_is_number, words)))
        widths.append(longest)
    natural = Measurement.get(console, console.options.update(width=10**6), table).maximum
    frame = natural - sum(_widest(str(c.header), *map(str, c.cells)) for c in table.columns)
    for lowest in (whole, least):  # between words first, then inside of names
        while sum(widths) + frame > console.width:
            slack = [width if width > low else 0 for width, low in zip(widths, lowest)]
            if not any(slack):
                break
            widths[slack.index(max(slack))] -= 1
    for column, width in zip(table.columns, widths):
        column.width, column.overflow, column.no_wrap = width, "fold", False
    if sum(widths) + frame > console.width:
        table.width = sum(widths) + frame
    console.print(table, crop=False)


def _is_number(word: str) -> bool:
    return any(map(str.isdigit, word)) and not any(map(str.isalpha, word.replace("e-", "")))


def _widest(*texts: str) -> int:
    return max((cell_len(line) for text in texts for line in text.split("\n")), default=0)


def validation_documents(count: int) -> str:
    """1 validation document, 2 validation documents."""
    return f"{count:,} validation document" + ("" if count == 1 else "s")


def known(value: Any, form: Callable[[Any], str]) -> str:
    """`form(value)`; `-` for None and NaN, which stand for what is not known."""
    return "-" if value is None or value != value else form(value)


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


def rounded(count: float) -> str:
    """`thousands` of three digits: 1.23M."""
    return thousands(float(f"{count:.3g}"))
