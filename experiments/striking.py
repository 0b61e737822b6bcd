"""Does to real jobs what a script of faults says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from experiments.board import last_line
from experiments.faults import INSIDE, Fault
from experiments.workdir import METRICS


class Target(Protocol):
    """One region's process; `held` while it is not to be taken for lost."""

    workdir: Path
    held: bool

    def start(self) -> None: ...

    def signal(self, number: signal.Signals) -> None: ...


class Striker:
    """Begins and ends faults as the furthest region goes on.

    Args:
      targets: by region.
      rendezvous: the folder where they meet; every region goes there by a `door` of its own.
    """

    def __init__(self, faults: Sequence[Fault], targets: Sequence[Target], rendezvous: Path):
        self._waiting = [fault for fault in faults if fault.kind not in INSIDE]
        self._running: dict[Fault, float] = {}  # and when it began
        self._targets, self._rendezvous = targets, rendezvous

    def act(self, over: bool) -> list[str]:
        """Do what is due; returns what was done, a line each.

        Args:
          over: all regions that are up have ended, so that nothing goes on: end every fault.
        """
        if not self._waiting and not self._running:
            return []
        furthest, said = max(map(_step, self._targets)), []
        for fault in [f for f in self._running if over or self._is_over(f, furthest)]:
            del self._running[fault]
            self._end(fault)
            said.append(f"step {furthest}: {_named(fault)} ends")
        for fault in [f for f in self._waiting if f.step <= furthest and not over]:
            self._waiting.remove(fault)
            self._begin(fault)
            self._running[fault] = time.monotonic()
            said.append(f"step {furthest}: {_named(fault)} begins")
        return said

    def end_all(self) -> None:
        """Leave nothing stopped or away behind; what was killed stays so."""
        for fault in self._running:
            if fault.kind != "kill":
                self._end(fault)
        self._running = {}

    def _is_over(self, fault: Fault, furthest: int) -> bool:
        if fault.kind == "outage":
            return time.monotonic() - self._running[fault] >= fault.seconds
        return fault.end <= furthest

    def _begin(self, fault: Fault) -> None:
        if fault.kind == "outage":
            take_away(self._rendezvous)
            return
        target = self._targets[fault.region]
        target.held = True
        if fault.kind == "partition":
            _lead(door(self._rendezvous, fault.region), os.devnull)
        else:
            target.signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _end(self, fault: Fault) -> None:
        if fault.kind == "outage":
            bring_back(self._rendezvous)
            return
        target = self._targets[fault.region]
        if fault.kind == "partition":
            open_door(self._rendezvous, fault.region)
        elif fault.kind == "kill":
            target.start()
        else:
            target.signal(signal.SIGCONT)
        target.held = False


def door(rendezvous: Path, region: int) -> Path:
    """The name by which a region knows the folder, so that it alone can be cut off."""
    return rendezvous.with_name("doors") / f"region{region}"


def open_door(rendezvous: Path, region: int) -> None:
    """Let a region's door lead to the folder."""
    _lead(door(rendezvous, region), rendezvous)


def _lead(link: Path, target: Path | str) -> None:
    """Point a symbolic link elsewhere, in one step."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f"{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.rename(link)


def _named(fault: Fault) -> str:
    return fault.kind if fault.region is None else f"{fault.kind} of region {fault.region}"


def _step(target: Target) -> int:
    """Steps in a region's metrics file."""
    path = target.workdir / METRICS
    line = last_line(path) if path.is_file() else ""
    return json.loads(line).get("step", 0) if line else 0


def _away(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.away")


def take_away(folder: Path) -> None:
    """A file stands where the folder was: nothing can be read, listed or written there."""
    folder.rename(_away(folder))
    while not folder.is_file():
        # A write that was under way may have made the folder anew.
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(IsADirectoryError):
            folder.write_text("")


def bring_back(folder: Path) -> None:
    """Undo `take_away`."""
    folder.unlink()
    _away(folder).rename(folder)
