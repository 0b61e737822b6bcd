"""What a person sees while the runs of a comparison train: one line a run, and the time left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from experiments.compare.plan import Comparison, RunSpec
from experiments.live_table import LiveTable, last_line
from experiments.progress import Display, Now, duration
from experiments.runlog import read_run
from experiments.workdir import CHECKPOINTS

_EVERY_SECONDS = 0.5


class Progress:
    """Where every run that trains stands, how it ended, and how long the others will take.

    Leave it through `close`, or use it as a context.
    """

    def __init__(
        self,
        comparison: Comparison,
        left: int,
        console: Console,
        error_of: Callable[[Path], str | None],
    ):
        self.console, self._error_of = console, error_of
        self._keep = comparison.keep_checkpoints
        self._total, self._left, self._done = len(comparison.runs), left, 0
        self._seeds = len(comparison.seeds)
        self._started, self._looked = time.monotonic(), 0.0
        if left < self._total:
            text = f"{self._total - left} of {self._total} runs are complete already"
            console.print(text, highlight=False)
        self._table = LiveTable(console)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        self._table.close()

    def display(self, run: RunSpec) -> Display:
        """Shows a run that trains in this process."""
        self._say(run, "starts")
        return _Line(lambda text: self._say(run, text))

    def look(self, outputs: dict[Path, RunSpec]) -> None:
        """Show the last line of what other processes print; at most twice a second."""
        now = time.monotonic()
        if now - self._looked < _EVERY_SECONDS:
            return
        self._looked = now
        for output, run in outputs.items():
            self._say(run, last_line(output) or "starts")

    def ended(self, run: RunSpec, seconds: float) -> None:
        """Say how a run ended."""
        self._table.drop(self._name(run))
        self._left -= 1
        self._done += 1
        error = self._error_of(run.workdir)
        if error is None:
            text = f"eval loss {read_run(run.workdir).evals[-1]['anchor'] or float('nan'):.4f}"
            if not self._keep:
                shutil.rmtree(run.workdir / CHECKPOINTS, ignore_errors=True)
        else:
            text = f"failed: {error}"
        pace = (time.monotonic() - self._started) / self._done
        soon = f", about {duration(self._left * pace)} left" if self._left else ""
        number = f"[{self._total - self._left}/{self._total}]"
        self._table.print(
            f"{number} {run.variant} seed {run.seed}: {text} ({duration(seconds)}{soon})",
        )

    def _name(self, run: RunSpec) -> str:
        return run.variant if self._seeds == 1 else f"{run.variant} seed {run.seed}"

    def _say(self, run: RunSpec, line: str) -> None:
        self._table.say(self._name(run), line)


class _Line:
    """A run's numbers as one line of text."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say

    def update(self, now: Now) -> None:
        self._say(now.line())

    def close(self) -> None:
        pass
