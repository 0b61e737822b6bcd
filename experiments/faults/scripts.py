"""Read, check, draw and write scripts of faults (`fault` describes their format).

`random:SEED:COUNT` is a script of random faults: the same arguments give the same one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments.faults.fault import ABSENT, FIELDS, INSIDE, KINDS, Fault
from experiments.faults.happened import Happened, Settings, parsed

# What is said of a kind beside when, which and for how long, with its value in random faults.
_MORE = {"late": {"delay": 0.2}, "slow": {"mbit": 10}, "straggle": {"delay": 0.02}}
_WHOLE = ("step", "region", "steps")

RANDOM = "random:"
_OUTAGE_SECONDS = 6  # longer than regions wait for the folder before they train on
_TOGETHER = 2  # faults last as long as it takes until so many others have begun, at most

Faults = Sequence[Fault] | Happened
"""The faults of a script, or what happened in a run of jobs."""


def read(
    script: str | None, regions: int, steps: int, run: Settings | None = None
) -> tuple[Faults, list[str]]:
    """(the faults of a config, those of a script in order; problems).

    Whether a config's other settings allow them says `experiments.refusals`.

    Args:
      script: a file, or "random:SEED:COUNT"; None = no faults.
      regions, steps: of the run.
      run: that is to repeat what happened in another; None = a script alone will do.
    """
    if script is None:
        return [], []
    if script.startswith(RANDOM):
        return read_random(script, regions, steps)
    try:
        body = yaml.safe_load(Path(script).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return [], [f"faults={script!r} cannot be read: {error}"]
    if isinstance(body, dict) and run is not None:
        found, problems = parsed(body, script, run)
        return found or [], problems
    return checked(body, script, regions, steps)


def checked(entries: Any, script: str, regions: int, steps: int) -> tuple[list[Fault], list[str]]:
    """See `read`; entries: the content of the file."""
    if not isinstance(entries, list):
        return [], [f"faults={script!r}: give a list of faults, each with some of {list(FIELDS)}"]
    problems = [p for n, e in enumerate(entries, 1) for p in _problems(n, e, regions, steps)]
    if not problems and len({"time" in entry for entry in entries}) > 1:
        problems.append(f"faults={script!r}: give all faults a step, or all of them a time")
    if problems:
        return [], problems
    return in_turn([Fault(**{"step": None, **entry}) for entry in entries], regions)


def in_turn(faults: Sequence[Fault], regions: int) -> tuple[list[Fault], list[str]]:
    """Order faults by their begin.

    Faults on what a region sends (`INSIDE`) may overlap with one another and with all others.

    Returns:
      (faults, problems). It is a problem if a fault meets a region that is still down from another
      one, or if no region is left.
    """
    ordered = sorted(faults, key=lambda f: f.begin)
    problems: list[str] = []
    last: dict[int | None, Fault] = {}  # the one that ends last, by region
    for fault in (f for f in ordered if f.kind not in INSIDE):
        before = last.get(fault.region)
        if before is not None and fault.begin < before.end:
            who = "the rendezvous" if fault.region is None else f"region {fault.region}"
            when = _when(fault, fault.begin)
            problems.append(f"faults: {who} is still down {when}: begin later")
        if before is None or fault.end >= before.end:
            last[fault.region] = fault
    for fault in ordered:
        at = fault.begin
        gone = {f.region for f in ordered if f.kind in ABSENT and f.begin <= at < f.end}
        if len(gone) == regions:
            problems.append(f"faults: no region is left {_when(fault, at)}: leave one")
    return ordered, problems


def _when(fault: Fault, at: float) -> str:
    return f"after {at} s" if fault.timed else f"at step {at}"


def _problems(number: int, entry: Any, regions: int, steps: int) -> list[str]:
    """What is wrong with one entry."""
    if not isinstance(entry, dict) or not set(entry) <= set(FIELDS):
        return [f"fault {number}: give some of {list(FIELDS)}, not {entry!r}"]
    kind, region = entry.get("kind"), entry.get("region")
    if kind not in KINDS:
        return [f"fault {number}: kind={kind!r}: use {', '.join(KINDS)}"]
    if ("step" in entry) == ("time" in entry):
        return [f"fault {number}: say when it begins: give a step, or a time in seconds"]
    begin, length = ("time", "seconds") if "time" in entry else ("step", "steps")
    if kind == "outage":
        length = "seconds"
    allowed = {begin, *_MORE.get(kind, ())} | (set() if kind == "nan" else {length})
    needed = allowed - ({length} if kind == "kill" else set())
    given = {name: x for name, x in entry.items() if name not in ("kind", "region")}
    found = []
    for name in sorted(needed | (set(given) & allowed)):
        what = "a whole number above 0" if name in _WHOLE else "a number above 0"
        if not _positive(given.get(name), whole=name in _WHOLE):
            found.append(f"fault {number}: {name}={given.get(name)!r} must be {what}")
    found += [
        f"fault {number}: {kind} from a {begin} has no {name}: leave out {name}={given[name]}"
        for name in sorted(set(given) - allowed)
    ]
    if kind == "nan" and begin == "time":
        found.append(
            f"fault {number}: nan goes by steps: give a step in place of time={entry[begin]}"
        )
    if not found and begin == "step" and entry["step"] >= steps:
        found.append(f"fault {number}: step={entry['step']}: begin before the last step, {steps}")
    if kind == "outage" and region is not None:
        found.append(f"fault {number}: an outage is everybody's: leave out region={region}")
    if kind != "outage" and (isinstance(region, bool) or region not in range(regions)):
        found.append(f"fault {number}: region={region!r} must be one of 0 to {regions - 1}")
    return found


def _positive(value: Any, whole: bool) -> bool:
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < math.inf


def write(path: Path, faults: Sequence[Fault]) -> None:
    """Write a script that `read` reads."""
    lines = (yaml.safe_dump(f.entry(), default_flow_style=True, width=math.inf) for f in faults)
    path.write_text("".join(f"- {line}" for line in lines) or "[]\n", encoding="utf-8")


# -- random faults ---------------------------------------------------------------------------------


def read_random(script: str, regions: int, steps: int) -> tuple[list[Fault], list[str]]:
    """See `read`."""
    numbers = script.removeprefix(RANDOM).split(":")
    if len(numbers) != 2 or not all(n.isdigit() for n in numbers):
        return [], [f"faults={script!r}: give random:SEED:COUNT, two whole numbers"]
    seed, count = map(int, numbers)
    fits = last_begin(steps)
    if count > fits:
        fix = f"give steps={next(n for n in range(count, 3 * count + 9) if last_begin(n) >= count)}"
        return [], [
            f"faults={script!r}: each of {count} faults begins at a step of its own, before the "
            f"last tenth of {steps} steps, so that all regions can come back: {fix}, or "
            f"{fits} faults"
        ]
    return at_random(seed, count, regions, steps), []


def last_begin(steps: int) -> int:
    """The last step at which a drawn fault begins."""
    return steps * 9 // 10


def at_random(seed: int, count: int, regions: int, steps: int) -> list[Fault]:
    """`count` faults spread over the run, a pure function of all arguments.

    Each begins at a random step of its own part of the run. Faults of different regions overlap; a
    region has one at a time, and at every step some region has none of kinds `fault.ABSENT`.

    Args:
      count: `last_begin(steps)` at most.
    """
    rng, whole = np.random.default_rng(seed), last_begin(steps)
    longest = max(1, min(regions - 1, _TOGETHER) * (whole // max(count, 1)))
    found: list[Fault] = []
    for number in range(count):
        begin = 1 + int(rng.integers(number * whole // count, (number + 1) * whole // count))
        on = [f for f in found if f.region is not None and f.end > begin]
        free = sorted(set(range(regions)) - {f.region for f in on})
        kind = str(rng.choice(_possible(on, regions)))
        region, length = int(rng.choice(free)), int(rng.integers(1, longest + 1))
        if kind == "outage":
            found.append(Fault(begin, kind, seconds=_OUTAGE_SECONDS))
            continue
        given = {} if kind == "nan" else {"steps": length}
        found.append(Fault(begin, kind, region, **given, **_MORE.get(kind, {})))
    return found


def _possible(on: Sequence[Fault], regions: int) -> list[str]:
    """Kinds that leave one region up beside the active faults; every kill has an end."""
    left = regions - sum(f.kind in ABSENT for f in on)
    return [k for k in KINDS if left > 1 or k not in ABSENT]
