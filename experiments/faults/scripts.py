"""Read, check and write scripts of faults (`fault` describes their format)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.faults.fault import ABSENT, FIELDS, INSIDE, KINDS, Fault
from experiments.faults.happened import Happened, Settings, parsed
from experiments.faults.random_scripts import RANDOM, read_random

# What is said of a kind beside when, which and for how long.
_MORE = {"late": ("delay",), "slow": ("mbit",), "straggle": ("delay",)}
_WHOLE = ("step", "region", "steps")


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
