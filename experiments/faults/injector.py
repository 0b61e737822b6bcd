"""Inject the faults of a script into real jobs: kill, stop and cut off regions, and undo it.

A full disk is a link to /dev/full in the place of a file that the job must write (`landings`).

The launcher calls `Injector.act` at intervals. Faults of kinds `INSIDE` are not injected here, but
by `fault_hooks` in the region's own job.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.faults.fault import BESIDE, ENDS, INSIDE, Fault, Moment
from experiments.faults.landings import FILE
from experiments.faults.origin import noted
from experiments.faults.rendezvous_cut import cut_all, cut_region, reconnect_all, reconnect_region
from experiments.faults.strangers import RegionTarget, Strangers
from experiments.processes import last_line
from experiments.workdir import METRICS

_PATIENCE_SECONDS = 60.0
_FULL = Path("/dev/full")


class Injector:
    """Begins and ends faults as the run goes on.

    A fault of a region begins only when that region, back from its last fault, and another one are
    in the run. Until then the fault waits; its length stays the same. Where no region makes a step
    for a minute, faults that end at a step end at once. After an interruption of the run, faults
    that were over are not injected again; those that were active are.

    Args:
      targets: by region.
      rendezvous: folder in which the jobs meet; every region reaches it by a symbolic link of its
        own (`rendezvous_cut.region_link`).
    """

    def __init__(self, faults: Sequence[Fault], targets: Sequence[RegionTarget], rendezvous: Path):
        self._targets, self._rendezvous = targets, rendezvous
        self._strangers = Strangers(rendezvous)
        for target in targets:
            _make_room(target.workdir)  # after a launcher that was killed
        self._began: float | None = None
        now = self._now()
        outside = [fault for fault in faults if fault.kind not in INSIDE]
        self._waiting = [f for f in outside if now.step == 0 or f.end > f.at(now)]
        self._total = len(self._waiting)
        self._running: dict[Fault, tuple[float, float]] = {}  # since when: what it goes by, clock
        # A region is in the run from this step on: that of the others when its last fault was over.
        self._in_from = [1] * len(targets)
        self._moved = now.step, time.monotonic()

    def act(self, over: bool) -> list[str]:
        """Begin and end the faults that are due.

        Args:
          over: whether all regions that are up have ended; every fault then ends. A region that was
            to come back is started again, and takes the result, if they left one.

        Returns:
          What was done, a line each.
        """
        if not self._waiting and not self._running:
            return []
        now = self._now()
        self._strangers.act(list(self._running))
        if now.step != self._moved[0]:
            self._moved = now.step, time.monotonic()
        stuck = time.monotonic() > self._moved[1] + _PATIENCE_SECONDS
        said, ending = [], [f for f in self._running if over or self._is_over(f, now, stuck)]
        for fault in sorted(ending, key=lambda f: f.kind in ENDS):  # an outage before these
            del self._running[fault]
            if over and fault.kind in ENDS and not self._may_return(fault):
                self._leave(fault)
                said.append(f"step {now.step}: the run is over without region {fault.region}")
                continue
            self._end(fault, now)
            said.append(f"step {now.step}: {_named(fault)} ends")
        if over:
            said += [f"{_named(fault)} never came: the run is over" for fault in self._waiting]
            self._total -= len(self._waiting)
            self._waiting = []
        for fault in [f for f in self._waiting if f.begin <= f.at(now)]:
            if not self._may_begin(fault):
                continue
            self._waiting.remove(fault)
            self._begin(fault)
            self._running[fault] = fault.at(now), time.monotonic()
            said.append(f"step {now.step}: {_named(fault)} begins")
        return said

    @property
    def progress(self) -> str:
        """How many faults have begun, and how many are on."""
        begun = self._total - len(self._waiting)
        return f"{begun} of {self._total} have begun, {len(self._running)} are on"

    def end_all(self) -> None:
        """Let stopped regions run and restore links and files; killed regions stay dead."""
        for fault in self._running:
            if fault.kind == "full_disk":
                _make_room(self._targets[fault.region].workdir)
            elif fault.kind != "kill":
                self._end(fault, self._now())
        self._running = {}

    def _now(self) -> Moment:
        """Steps of the furthest region, and seconds."""
        if self._began is None:
            found = (noted(target.workdir) for target in self._targets)
            self._began = next(filter(None, found), None)
        seconds = None if self._began is None else time.time() - self._began
        return Moment(max(map(_step, self._targets)), seconds)

    def _is_over(self, fault: Fault, now: Moment, stuck: bool) -> bool:
        since, clock = self._running[fault]
        if fault.kind == "outage":
            return time.monotonic() - clock >= fault.seconds
        if not self._strangers.has_begun(fault):
            return False
        if stuck and not fault.timed and fault.end < math.inf:
            return True
        return fault.at(now) >= max(fault.end, since + fault.length if since > fault.end else 0)

    def _may_begin(self, fault: Fault) -> bool:
        if fault.kind == "outage":
            return all(other.kind != "outage" for other in self._running)
        regions = range(len(self._targets))
        return self._is_in(fault.region) and sum(map(self._is_in, regions)) > 1

    def _is_in(self, region: int) -> bool:
        target = self._targets[region]
        return not target.held and target.code is None and _step(target) >= self._in_from[region]

    def _begin(self, fault: Fault) -> None:
        if fault.kind == "outage":
            cut_all(self._rendezvous)
            return
        target = self._targets[fault.region]
        if fault.kind in BESIDE:
            self._strangers.begin(fault, target.impostor())
            return
        target.held = True
        if fault.kind == "partition":
            cut_region(self._rendezvous, fault.region)
        elif fault.kind == "full_disk":
            _fill(target.workdir)
        else:
            target.signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _end(self, fault: Fault, now: Moment) -> None:
        if fault.kind == "outage":
            reconnect_all(self._rendezvous)
            return
        target = self._targets[fault.region]
        if fault.kind in BESIDE:
            self._strangers.end(fault)
            return
        if fault.kind == "partition":
            reconnect_region(self._rendezvous, fault.region)
        elif fault.kind in ENDS:
            self._revive(fault)
        else:
            target.signal(signal.SIGCONT)
        target.held = False
        self._in_from[fault.region] = now.step + 1

    def _may_return(self, fault: Fault) -> bool:
        """Whether a region was to come back, and the newest epoch's result stands in the store.

        Those that end within moments of its death leave none (`Membership.misses`).
        """
        names = [path.name.partition(".")[0] for path in self._rendezvous.glob("*/epoch/*.*")]
        newest = max((int(name) for name in names if name.isdecimal()), default=0)
        results = self._rendezvous.glob(f"*/result/{newest}.0")
        return fault.end < math.inf and any(results)

    def _revive(self, fault: Fault) -> None:
        """Start a region's job again, which has ended."""
        target = self._targets[fault.region]
        if fault.kind == "full_disk":
            # It has ended by itself, unless nothing has landed since.
            target.signal(signal.SIGKILL)
            _make_room(target.workdir)
        target.start()

    def _leave(self, fault: Fault) -> None:
        """Give a region up whose job has ended."""
        target = self._targets[fault.region]
        if fault.kind == "full_disk":
            target.signal(signal.SIGKILL)
            _make_room(target.workdir)
        target.held = False
        target.code = 0 if fault.end == math.inf else -signal.SIGKILL


def _fill(workdir: Path) -> None:
    """Let the job find a full disk when it next writes what it saw land (learners do not)."""
    path = workdir / FILE
    if path.is_file():
        path.rename(_kept(workdir))
        path.symlink_to(_FULL)


def _make_room(workdir: Path) -> None:
    """Undo `_fill`, if it was done."""
    if _kept(workdir).is_file():
        _kept(workdir).replace(workdir / FILE)


def _kept(workdir: Path) -> Path:
    return workdir / f"{FILE}.kept"


def _named(fault: Fault) -> str:
    return fault.kind if fault.region is None else f"{fault.kind} of region {fault.region}"


def _step(target: RegionTarget) -> int:
    """Steps in a region's metrics file."""
    path = target.workdir / METRICS
    line = last_line(path) if path.is_file() else ""
    return json.loads(line).get("step", 0) if line else 0
