"""Train the runs of a comparison: skip complete ones, continue interrupted ones.

`python -m experiments.compare.runs FOLDER [CACHE]` trains one run in a process of its own. FOLDER
holds the run's config.json; CACHE is the folder of compiled programs, or `off`.

A run that fails leaves its traceback in `error.txt` of its folder, and the others go on. On a
signal (`lowcomm_jax.interrupt`) the runs in progress save, and the comparison ends.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.compare.plan import ERROR, Comparison, RunSpec, error_of, finished
from experiments.compare.progress import Progress
from experiments.processes import POLL_SECONDS, end_with_parent, ended_at_last, start
from experiments.progress import Display, plain_console
from experiments.train import compile_cache
from experiments.train.main import train
from experiments.train.resolve import resolve
from experiments.workdir import OccupiedError, as_begun, read_config, write_config
from lowcomm_jax.interrupt import EXIT_INTERRUPTED, Interrupt

OUTPUT = "output.txt"


def run_all(comparison: Comparison, console: Console) -> bool:
    """Train every run that is not complete; returns False when a signal ended it.

    Raises:
      KeyboardInterrupt: a signal came while nothing was being trained (`terminations_interrupt`).
    """
    left = [run for run in comparison.runs if not finished(run.workdir)]
    train_them = _one_by_one if comparison.config["parallel"] == 1 else _side_by_side
    with Progress(comparison, left, console) as progress:
        return train_them(left, comparison, progress)


def attempt(
    fields: Mapping[str, Any], workdir: Path, console: Console, display: Display | None = None
) -> bool:
    """Train one run; returns False when a signal stopped it. An error is written to `error.txt`.

    Args:
      display: shows its progress; None = lines on the console.

    Raises:
      OccupiedError: another process trains this run.
    """
    (workdir / ERROR).unlink(missing_ok=True)
    try:
        return train(resolve(fields, workdir), console, display=display)
    except OccupiedError:
        raise
    except Exception as error:  # one run's failure must not end the others; it is written down
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        workdir.mkdir(parents=True, exist_ok=True)
        text = f"{traceback.format_exc()}\n{reason}\n"
        (workdir / ERROR).write_text(text, encoding="utf-8")
        return True


@contextlib.contextmanager
def terminations_interrupt() -> Iterator[None]:
    """Signals raise KeyboardInterrupt, as SIGINT does, wherever no training loop is saving."""

    def interrupt(number):
        raise KeyboardInterrupt

    with Interrupt(act=interrupt):
        yield


def _one_by_one(runs: list[RunSpec], comparison: Comparison, progress: Progress) -> bool:
    del comparison
    for run in runs:
        started = time.monotonic()
        if not attempt(run.fields, run.workdir, progress.console, progress.display(run)):
            return False
        progress.ended(run, time.monotonic() - started)
    return True


def _side_by_side(runs: list[RunSpec], comparison: Comparison, progress: Progress) -> bool:
    """Keep `parallel` processes busy; a signal is passed on to them, and they save."""
    waiting, busy = list(reversed(runs)), {}
    with Interrupt() as interrupt, ended_at_last(busy):
        while (waiting or busy) and not interrupt.requested:
            if waiting and len(busy) < comparison.config["parallel"]:
                run = waiting.pop()
                busy[_start(run, comparison.config["compile_cache"])] = run, time.monotonic()
            for process in [p for p in busy if p.poll() is not None]:
                run, started = busy.pop(process)
                if process.returncode == EXIT_INTERRUPTED:
                    return False
                if process.returncode:
                    _note_death(run.workdir, process.returncode)
                progress.ended(run, time.monotonic() - started)
            progress.look({run.workdir / OUTPUT: run for run, _ in busy.values()})
            time.sleep(POLL_SECONDS)
        return not interrupt.requested


def _start(run: RunSpec, cache: str | None) -> subprocess.Popen:
    """Train a run in a process of its own."""
    write_config(run.workdir, as_begun(run.workdir, run.fields))
    (run.workdir / ERROR).unlink(missing_ok=True)
    arguments = [str(run.workdir)] + ([] if cache is None else [cache])
    return start("experiments.compare.runs", arguments, run.workdir / OUTPUT)


def _note_death(workdir: Path, code: int) -> None:
    """Write `error.txt` for a process that could not: it was killed, or ended before training."""
    if error_of(workdir) is None:
        text = f"the process ended with code {code}; its last output is in {OUTPUT}\n"
        (workdir / ERROR).write_text(text, encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Train one run in this process; returns the exit code (0: complete, 1: failed, 75: saved)."""
    workdir, cache = Path(argv[0]), argv[1] if len(argv) > 1 else None
    with terminations_interrupt():
        try:
            compile_cache.enable(cache)
            if not attempt(read_config(workdir), workdir, plain_console()):
                return EXIT_INTERRUPTED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    return 0 if error_of(workdir) is None else 1


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
