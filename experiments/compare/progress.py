"""What is shown while the runs of a comparison train: how far each is, and the time left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.compare.plan import Comparison, RunSpec, error_of
from experiments.processes import last_line
from experiments.progress import Display, Lines, LiveLines, duration, steps_of
from experiments.report.runlog import RunLog, read_run, summarise
from experiments.workdir import CHECKPOINTS

_EVERY_SECONDS = 0.5
_TELL_AGAIN = 0.25  # without a terminal: an estimate that changed by this share is printed again


class TimeLeft:
    """Estimates how long the runs of a comparison will take, from their steps so far.

    A run's time is its set-up (start, corpus, compilation) and its steps at its own pace. A run
    without a pace yet is taken to have the mean pace and set-up of the others.

    Args:
      steps: name -> steps of every run that is to be trained; None = not known before it starts.
        Until then it is taken to be as long as those that are known.
      parallel: how many train at once.
    """

    def __init__(self, steps: dict[str, int | None], parallel: int):
        self._steps, self._parallel = dict(steps), max(1, parallel)
        self._started: dict[str, float] = {}
        self._seen: dict[str, list[tuple[float, int]]] = {}  # (when, step): first and newest
        self._ended: set[str] = set()

    def starts(self, name: str, now: float) -> None:
        """Note that a run started at `now`, in seconds of any clock that never goes back."""
        self._started.setdefault(name, now)

    def at(self, name: str, step: int, now: float, steps: int | None = None) -> None:
        """Note that a run has made `step` steps at `now`, of `steps` if it says so."""
        if steps is not None:
            self._steps[name] = steps
        seen = self._seen.setdefault(name, [])
        if not seen or step > seen[-1][1]:
            seen[1:] = [(now, step)] if seen else []
            if not seen:
                seen.append((now, step))

    def ends(self, name: str) -> None:
        """Note that a run has ended, complete or not."""
        self._ended.add(name)

    def pace(self, name: str) -> float | None:
        """Seconds a step of a run, evaluations included; None before it was noted twice."""
        seen = self._seen.get(name, [])
        if len(seen) < 2:
            return None
        (before, first), (after, last) = seen
        return (after - before) / (last - first)

    def left(self, now: float) -> float | None:
        """Seconds until all have ended; None before any run has a pace."""
        paces = {name: self.pace(name) for name in self._steps}
        paces = {name: pace for name, pace in paces.items() if pace is not None}
        if not paces:
            return None
        pace = sum(paces.values()) / len(paces)
        set_ups = [
            max(0.0, when - self._started[name] - paces[name] * step)
            for name in paces
            for when, step in self._seen[name][:1]
        ]
        set_up = sum(set_ups) / len(set_ups)
        told = [steps for steps in self._steps.values() if steps is not None]
        usual = sum(told) / len(told) if told else 0
        each = []
        for name, steps in self._steps.items():
            if name in self._ended:
                continue
            steps = usual if steps is None else steps
            whole, seen = set_up + pace * steps, self._seen.get(name)
            if seen:
                when, step = seen[-1]
                each.append(max(0.0, paces.get(name, pace) * (steps - step) - (now - when)))
            elif name in self._started:
                each.append(max(pace * steps, whole - (now - self._started[name])))
            else:
                each.append(whole)
        return max(sum(each) / self._parallel, max(each, default=0.0))


class Progress(LiveLines):
    """Shows the step of every run that trains, how runs ended, and the time left; a context.

    Args:
      left: the runs that are not complete.
    """

    def __init__(self, comparison: Comparison, left: Sequence[RunSpec], console: Console):
        self._comparison = comparison
        self._total, self._left = len(comparison.runs), len(left)
        self._trained: list[tuple[RunLog, float]] = []  # complete, and its seconds
        self._several = len(comparison.seeds) > 1
        self._started, self._looked, self._told = time.monotonic(), 0.0, None
        # A run of so many tokens has no number of steps before it tells.
        waiting = {self._name(run): run.fields.get("steps") or None for run in left}
        self._time = TimeLeft(waiting, comparison.config["parallel"])
        if self._left < self._total:
            text = f"{self._total - self._left} of {self._total} runs are complete already"
            console.print(text, highlight=False)
        super().__init__(console, self._heading)

    def close(self) -> None:
        super().close()
        if self._left == 0 and self._trained:
            self.print(_shares(self._trained, time.monotonic() - self._started))

    def display(self, run: RunSpec) -> Display:
        """Shows a run that trains in this process."""
        self._note(run, "starts")
        return Lines(lambda text: self._note(run, text))

    def look(self, outputs: dict[Path, RunSpec]) -> None:
        """Show the last line of each process's output file; at most twice a second."""
        now = time.monotonic()
        if now - self._looked < _EVERY_SECONDS:
            return
        self._looked = now
        for output, run in outputs.items():
            self._note(run, last_line(output) or "starts")

    def ended(self, run: RunSpec, seconds: float) -> None:
        """Print how a run ended."""
        self._left -= 1
        self._time.ends(self._name(run))
        self.end(self._name(run))
        error = error_of(run.workdir)
        text = f"failed: {error}"
        if error is None:
            log = read_run(run.workdir)
            self._trained.append((log, seconds))
            text = f"eval loss {log.evals[-1]['anchor'] or float('nan'):.4f}"
            if not self._comparison.config["keep_checkpoints"]:
                shutil.rmtree(run.workdir / CHECKPOINTS, ignore_errors=True)
        guess = self._time.left(time.monotonic())
        soon = f", about {duration(guess)} left" if self._left and guess is not None else ""
        number = f"[{self._total - self._left}/{self._total}]"
        self.print(f"{number} {run.variant} seed {run.seed}: {text} ({duration(seconds)}{soon})")

    def _name(self, run: RunSpec) -> str:
        return f"{run.variant} seed {run.seed}" if self._several else run.variant

    def _note(self, run: RunSpec, line: str) -> None:
        name, now, told = self._name(run), time.monotonic(), steps_of(line)
        self._time.starts(name, now)
        if told is not None:
            self._time.at(name, told[0], now, told[1])
        self.say(name, _short(line) if self.live and told else line)
        if not self.live:
            self._tell(now)

    def _tell(self, now: float) -> None:
        """Without a terminal: print the time left once it is known, and again where it changed."""
        left = self._time.left(now)
        if left is None:
            return
        whole = now - self._started + left
        if self._told is None or abs(whole / self._told - 1) > _TELL_AGAIN:
            corrected = "" if self._told is None else ", corrected"
            self._told = whole
            self.print(f"measured by the first steps{corrected}: {self._guess(left, whole)}")

    def _guess(self, left: float, whole: float) -> str:
        at_once = self._comparison.config["parallel"]
        together = f", {at_once} runs at once" if at_once > 1 else ""
        return (
            f"about {duration(whole)} in all on this machine{together}; about {duration(left)} left"
        )

    def _heading(self) -> str:
        now = time.monotonic()
        left, spent = self._time.left(now), now - self._started
        text = f"{self._total - self._left} of {self._total} done, {duration(spent)} so far; "
        if left is None:
            return text + "how long it takes is known after the first steps"
        return text + self._guess(left, spent + left)


def _shares(trained: Sequence[tuple[RunLog, float]], wall: float) -> str:
    """How `wall` seconds were spent, divided in proportion to the runs' own seconds."""
    training = evaluating = 0.0
    for log, _ in trained:
        found = summarise(log)
        training += found.tokens / found.tokens_per_second if found.tokens_per_second else 0.0
        each = [record["phases"]["eval"] for record in log.intervals[1:]]
        each = [seconds for seconds in each if seconds]
        evaluating += len(log.evals) * sum(each) / len(each) if each else 0.0
    total = sum(seconds for _, seconds in trained)
    set_up = max(0.0, total - training - evaluating)
    parts = {
        "set-up (start, corpus, compilation)": set_up,
        "training": training,
        "evaluation": evaluating,
    }
    scale = wall / max(set_up + training + evaluating, 1e-9)
    shares = ", ".join(f"{duration(scale * spent)} of {what}" for what, spent in parts.items())
    return f"{len(trained)} runs took {duration(wall)}: {shares}"


def _short(line: str) -> str:
    """The step and the time left from a run's line: a narrow terminal has room for no more."""
    first, *others = line.split("  ")
    return ", ".join([first, *(part for part in others if part.endswith(" left"))])
