"""Scripts of random faults, `random:SEED:COUNT`: the same arguments give the same script."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.faults.fault import ABSENT, KINDS, Fault

RANDOM = "random:"
_SECONDS = 6  # longer than regions wait for the folder before they train on
_MORE = {"late": {"delay": 0.2}, "slow": {"mbit": 10}, "straggle": {"delay": 0.02}}
_TOGETHER = 2  # faults last as long as it takes until so many others have begun, at most


def read_random(script: str, regions: int, steps: int) -> tuple[list[Fault], list[str]]:
    """See `scripts.read`."""
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
            found.append(Fault(begin, kind, seconds=_SECONDS))
            continue
        given = {} if kind == "nan" else {"steps": length}
        found.append(Fault(begin, kind, region, **given, **_MORE.get(kind, {})))
    return found


def _possible(on: Sequence[Fault], regions: int) -> list[str]:
    """Kinds that leave one region up beside the active faults; every kill has an end."""
    left = regions - sum(f.kind in ABSENT for f in on)
    return [k for k in KINDS if left > 1 or k not in ABSENT]
