"""Read the faults of a config, and check that its other settings allow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.faults import happened, scripts
from experiments.faults.fault import ENDS, Fault
from experiments.faults.happened import Happened
from experiments.faults.random_scripts import RANDOM
from experiments.regions.jobs import is_separate_job
from lowcomm_jax.methods import Method

Faults = tuple[Fault, ...] | Happened


def read_faults(
    fields: Mapping[str, Any], steps: int, method: Method | None
) -> tuple[Faults, list[str]]:
    """Read the faults that a config names.

    Returns:
      (a script's faults, or what happened in a run of jobs; problems).
    """
    script, regions, steps = fields["faults"], max(fields["regions"], 1), max(steps, 1)
    if script is None:
        return (), []
    if script.startswith(RANDOM):
        found, problems = scripts.read(script, regions, steps)
        return tuple(found), problems + _script_problems(fields, found, method)
    body, problems = scripts.load(script)
    if problems:
        return (), problems
    if isinstance(body, dict):
        it, problems = happened.parsed(body, script, happened.settings(fields, steps))
        return it or (), problems or _replay_problems(fields, it, method)
    found, problems = scripts.checked(body, script, regions, steps)
    return tuple(found), problems + _script_problems(fields, found, method)


def _script_problems(
    fields: Mapping[str, Any], found: Sequence[Fault], method: Method | None
) -> list[str]:
    """Faults of a script that a simulation cannot apply, each with its fix."""
    if is_separate_job(fields):
        return []
    problems = []
    if any(fault.timed for fault in found) and fields["network"] is None:
        problems.append(
            f"faults={fields['faults']!r} go by time, and there is no clock: give a network, or "
            "faults by step"
        )
    if any(fault.kind in ENDS for fault in found):
        problems += _rejoin_problems(fields, method, "a region that is killed", "use kind stop")
    if any(fault.kind == "nan" for fault in found) and method is not None and method.adapts:
        problems.append("faults: kind nan is not for batches that grow: leave it out")
    return problems


def _rejoin_problems(
    fields: Mapping[str, Any], method: Method | None, who: str, fix: str
) -> list[str]:
    """Where `lowcomm_jax.recovery.rejoin_sim` does not work."""
    found = []
    if method is not None and method.adapts:
        found.append(f"faults: {who} does not come back where batches grow: {fix}")
    if fields["offload"]:
        found.append(f"faults: {who} does not come back with offload: leave that out, or {fix}")
    return found


def _replay_problems(fields: Mapping[str, Any], it: Happened, method: Method | None) -> list[str]:
    """What one process cannot repeat of the jobs' run, each with its fix."""
    if is_separate_job(fields):
        fix = "replay it with train and exchange=mesh"
        return [f"faults={fields['faults']!r} is what happened to jobs: {fix}"]
    fix = "compare losses instead"
    found = [
        f"faults: region {one.region} came back at step {one.step} with the inner optimizer's "
        f"state of its checkpoint of step {one.moments_of}, which is not kept here: run jobs with "
        f"checkpoint.every=0 where that is to be done again, or {fix}"
        for one in it.rejoined
        if one.moments_of is not None
    ]
    if it.rejoined:
        found += _rejoin_problems(fields, method, "a region that was lost", fix)
    if method is None:
        return found
    if method.adapts:
        found.append(f"faults: jobs of {method.name} leave no record to repeat: leave faults out")
    if it.rejoined and method.anchors == "per_region":
        found.append(
            f"faults: with {method.name} a region comes back with the anchor of another, and which "
            f"one is not known: {fix}"
        )
    if method.topology is not None and it.run.steps in it.left_out:
        found.append(
            f"faults: with {method.name} jobs do not synchronise once more after a region was left "
            f"out at the last step, {it.run.steps}, a simulation does: {fix}"
        )
    if it.left_out and method.schedule.land_after_send:
        found.append(
            f"faults: with {method.name} jobs lose payloads that were left out, a simulation keeps "
            f"them: {fix}"
        )
    if it.left_out and fields["weights"] == "tokens":
        found.append(f"faults: jobs count tokens of payloads that were left out as sent: {fix}")
    return found
