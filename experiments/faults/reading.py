"""Read the faults of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.faults import happened, scripts
from experiments.faults.fault import Fault
from experiments.faults.happened import Happened
from experiments.faults.random_scripts import RANDOM

Faults = tuple[Fault, ...] | Happened


def read_faults(fields: Mapping[str, Any], steps: int) -> tuple[Faults, list[str]]:
    """Read the faults that a config names; whether its other settings allow them says `refusals`.

    Returns:
      (a script's faults, or what happened in a run of jobs; problems).
    """
    script, regions, steps = fields["faults"], max(fields["regions"], 1), max(steps, 1)
    if script is None:
        return (), []
    if script.startswith(RANDOM):
        found, problems = scripts.read(script, regions, steps)
        return tuple(found), problems
    body, problems = scripts.load(script)
    if problems:
        return (), problems
    if isinstance(body, dict):
        it, problems = happened.parsed(body, script, happened.settings(fields, steps))
        return it or (), problems
    found, problems = scripts.checked(body, script, regions, steps)
    return tuple(found), problems
