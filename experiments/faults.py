"""Faults by script: what happens to which region at which step, on a mesh and to real jobs alike.

A script is a YAML list, or `random:SEED:COUNT`:

    - {step: 40, kind: kill, region: 1, steps: 30}    # dies, and is started again 30 steps later
    - {step: 90, kind: stop, region: 2, steps: 10}    # stands still (SIGSTOP)
    - {step: 120, kind: outage, seconds: 5}           # nobody reaches the rendezvous

Steps are those of the furthest region. `launch --faults=` does it to real jobs. On a mesh (`train
--config.faults=`) a region that is killed or stopped takes no part in exchanges meanwhile; it keeps
its own values, where a job that was killed comes back with the anchor's. An outage changes nothing
there: exchanges wait for its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

KINDS = ("kill", "stop", "outage")
_FIELDS = {"step", "kind", "region", "steps", "seconds"}
_SECONDS = 3.0  # of a random outage
_RANDOM = "random:"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      step: begins when the furthest region has made so many inner steps.
      kind: one of `KINDS`.
      region: whose; None for an outage.
      steps: ends so many steps later.
      seconds: an outage's length: steps may wait for its end.
    """

    step: int
    kind: str
    region: int | None = None
    steps: int = 0
    seconds: float = 0.0

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
        gone = {f.region for f in ordered if f.region is not None and f.step <= fault.step < f.end}
        if len(gone) == regions:
            problems.append(f"faults: no region is left at step {fault.step}: leave one")
    return ordered, problems


def _problems(number: int, entry: Any, regions: int) -> list[str]:
    if not isinstance(entry, dict) or not set(entry) <= _FIELDS:
        return [f"fault {number}: give {sorted(_FIELDS)}, not {entry!r}"]
    kind, region = entry.get("kind"), entry.get("region")
    length = "seconds" if kind == "outage" else "steps"
    found = [
        f"fault {number}: {name}={entry.get(name)!r} must be a number above 0"
        for name in ("step", length)
        if not isinstance(entry.get(name), int | float) or entry[name] <= 0
    ]
    found += [
        f"fault {number}: {kind} lasts {length}, leave out {name}={entry[name]}"
        for name in {"seconds", "steps"} - {length}
        if name in entry
    ]
    if kind not in KINDS:
        found.append(f"fault {number}: kind={kind!r}: use {', '.join(KINDS)}")
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
        if kind == "outage":
            found.append(Fault(number * every, kind, seconds=_SECONDS))
        else:
            region = int(rng.integers(regions))
            found.append(Fault(number * every, kind, region, max(1, every // 2)))
    return found


def participants(faults: Sequence[Fault], regions: int) -> Callable[[int], np.ndarray]:
    """Inner step -> bool `[R]`: who is up."""

    def up(step: int) -> np.ndarray:
        mask = np.ones(regions, bool)
        for fault in faults:
            if fault.region is not None and fault.step <= step < fault.end:
                mask[fault.region] = False
        return mask

    return up
