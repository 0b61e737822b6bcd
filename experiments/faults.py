"""Faults by script: what happens to which region at which step, on a mesh and to real jobs alike.

A script is a YAML list, or `random:SEED:COUNT`:

    - {step: 40, kind: kill, region: 1, steps: 30}       # dies; is started again 30 steps later
    - {step: 90, kind: stop, region: 2, steps: 10}       # stands still (SIGSTOP)
    - {step: 110, kind: partition, region: 0, steps: 9}  # does not reach the rendezvous
    - {step: 120, kind: outage, seconds: 5}              # nobody does
    - {step: 140, kind: corrupt, region: 1, steps: 20}   # of what it sends, a bit is flipped
    - {step: 170, kind: late, region: 2, steps: 20, seconds: 3}  # sends everything so much later
    - {step: 200, kind: slow, region: 3, steps: 20, mbit: 2}     # its link carries 2 Mbit/s

Steps are those of the furthest region; of `corrupt`, `late` and `slow`, those in which a payload is
sent. `launch --faults=` does it to real jobs. On a mesh (`train --config.faults=`) a region that is
killed, stopped, cut off or whose payloads are damaged takes no part in exchanges meanwhile; it
keeps its own values, where a job that was killed comes back with the anchor's. The others change
nothing there: exchanges wait for their end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ABSENT = ("kill", "stop", "partition", "corrupt")
"""Kinds whose region has no part in what is exchanged meanwhile."""
INSIDE = ("corrupt", "late", "slow")
"""Kinds that a region's job does to itself (`mishaps`)."""
_LENGTHS = {
    **{kind: {"steps"} for kind in ABSENT},
    "late": {"steps", "seconds"},
    "slow": {"steps", "mbit"},
    "outage": {"seconds"},
}
KINDS = tuple(_LENGTHS)
_NUMBERS = ("steps", "seconds", "mbit")
_FIELDS = {"step", "kind", "region", *_NUMBERS}
_SECONDS, _MBIT = 3.0, 1.0  # of random ones
_RANDOM = "random:"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      step: begins when the furthest region has made so many inner steps.
      kind: one of `KINDS`.
      region: whose; None for an outage.
      steps: ends so many steps later.
      seconds: an outage's length, for whose end steps may wait, or a late payload's delay.
      mbit: megabits a second of a slow link.
    """

    step: int
    kind: str
    region: int | None = None
    steps: int = 0
    seconds: float = 0.0
    mbit: float = 0.0

    @property
    def end(self) -> int:
        return self.step + self.steps


def read(script: str, regions: int, steps: int) -> tuple[list[Fault], list[str]]:
    """(the faults in order, what is wrong with them).

    Args:
      script: a file, or "random:SEED:COUNT".
      regions, steps: of the run.
    """
    if script.startswith(_RANDOM):
        numbers = script.removeprefix(_RANDOM).split(":")
        if len(numbers) != 2 or not all(n.isdigit() for n in numbers):
            return [], [f"faults={script!r}: give random:SEED:COUNT, two whole numbers"]
        return at_random(int(numbers[0]), int(numbers[1]), regions, steps), []
    try:
        entries = yaml.safe_load(Path(script).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        return [], [f"faults={script!r} cannot be read: {error}"]
    if not isinstance(entries, list):
        return [], [f"faults={script!r}: give a list of faults, each with {sorted(_FIELDS)}"]
    problems = [p for n, e in enumerate(entries, 1) for p in _problems(n, e, regions)]
    if problems:
        return [], problems
    return in_turn([Fault(**entry) for entry in entries], regions)


def in_turn(faults: Sequence[Fault], regions: int) -> tuple[list[Fault], list[str]]:
    """(the faults by step, where one meets a region that is still down from another)."""
    ordered, down, problems = sorted(faults, key=lambda f: f.step), {}, []
    for fault in ordered:
        before = down.get(fault.region)
        if before is not None and fault.step < before.end:
            who = "the rendezvous" if fault.region is None else f"region {fault.region}"
            problems.append(f"faults: {who} is still down at step {fault.step}: begin later")
        down[fault.region] = fault
    for fault in ordered:
        gone = {f.region for f in ordered if f.kind in ABSENT and f.step <= fault.step < f.end}
        if len(gone) == regions:
            problems.append(f"faults: no region is left at step {fault.step}: leave one")
    return ordered, problems


def _problems(number: int, entry: Any, regions: int) -> list[str]:
    if not isinstance(entry, dict) or not set(entry) <= _FIELDS:
        return [f"fault {number}: give {sorted(_FIELDS)}, not {entry!r}"]
    kind, region = entry.get("kind"), entry.get("region")
    if kind not in KINDS:
        return [f"fault {number}: kind={kind!r}: use {', '.join(KINDS)}"]
    found = [
        f"fault {number}: {name}={entry.get(name)!r} must be a number above 0"
        for name in ("step", *sorted(_LENGTHS[kind]))
        if not isinstance(entry.get(name), int | float) or entry[name] <= 0
    ]
    found += [
        f"fault {number}: {kind} has no {name}: leave out {name}={entry[name]}"
        for name in _NUMBERS
        if name in entry and name not in _LENGTHS[kind]
    ]
    if kind == "outage" and region is not None:
        found.append(f"fault {number}: an outage is everybody's: leave out region={region}")
    if kind != "outage" and region not in range(regions):
        found.append(f"fault {number}: region={region!r} must be one of 0 to {regions - 1}")
    return found


def at_random(seed: int, count: int, regions: int, steps: int) -> list[Fault]:
    """So many faults one after the other, spread over the run; never two at once."""
    rng, every = np.random.default_rng(seed), max(2, steps // (count + 1))
    found = []
    for number in range(1, count + 1):
        kind = str(rng.choice(KINDS))
        given = {"seconds": _SECONDS, "mbit": _MBIT, "steps": max(1, every // 2)}
        given = {name: given[name] for name in _LENGTHS[kind]}
        region = None if kind == "outage" else int(rng.integers(regions))
        found.append(Fault(number * every, kind, region, **given))
    return found


def participants(faults: Sequence[Fault], regions: int) -> Callable[[int], np.ndarray]:
    """Inner step -> bool `[R]`: who takes part in what is sent then."""

    def up(step: int) -> np.ndarray:
        mask = np.ones(regions, bool)
        for fault in faults:
            if fault.kind in ABSENT and fault.step <= step < fault.end:
                mask[fault.region] = False
        return mask

    return up
