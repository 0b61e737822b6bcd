"""Several `jax.distributed` processes in one region's job: how they start, agree and refuse."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax

from experiments.cli import RefusedError
from experiments.train import devices
from lowcomm_jax.mesh.leader import ProcessLostError, leader

EXIT_LOST = 1
"""Exit code of a process whose job has lost another one."""


def process_problems(fields: Mapping[str, Any]) -> list[str]:
    """Settings of processes that cannot work, or that nothing would read."""
    count, process, coordinator = (fields[k] for k in ("processes", "process", "coordinator"))
    if count < 0:
        return [f"processes={count}: give how many this job has, 0 = as the cluster says"]
    if count == 1:
        return [
            f"{name}={fields[name]!r} has no effect with processes=1: leave it out"
            for name in ("process", "coordinator")
            if fields[name] is not None
        ]
    found = []
    if process is not None and not 0 <= process < (count or process + 1):
        found.append(f"process={process}: say which of the {count} this is, 0 to {count - 1}")
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        found.append(f"coordinator={coordinator!r}: give HOST:PORT of process 0")
    asked = devices.asked_for(fields["mesh"])
    if count > 1 and asked % count and not (fields["mesh"]["fsdp"] == 0 and asked == 1):
        found.append(
            f"mesh of {asked} devices does not divide over processes={count}, which have as many "
            "each: use a multiple, or mesh.fsdp=0"
        )
    if fields["offload"]:
        found.append("offload: not with several processes; leave it out")
    return found


def start(fields: Mapping[str, Any]) -> None:
    """Meet the other processes of this job; with one process nothing happens.

    A process whose config does not say which one it is asks the cluster (Slurm, Open MPI,
    Kubernetes, JAX_COORDINATOR_ADDRESS).

    Raises:
      RefusedError: that is not known, or the others do not come within `wait_minutes`.
    """
    if fields["processes"] in (1, None) or process_problems(fields):
        return  # `resolve` refuses
    devices.provide(fields["mesh"], fields["processes"])
    # SIGTERM is ours: what it starts is agreed on here (`lowcomm_jax.interrupt`).
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            fields["coordinator"],
            fields["processes"] or None,
            fields["process"],
            initialization_timeout=max(1, round(60 * fields["wait_minutes"])),
        )
    except (ValueError, RuntimeError) as error:
        fix = "give processes, process and coordinator, the same coordinator in all of them"
        raise RefusedError(
            [f"processes: {error}; {fix}"], "cannot meet this job's processes"
        ) from (error)


def end(lost: ProcessLostError) -> NoReturn:
    """End this process at once; a normal exit would wait for the lost one (`jax.distributed`)."""
    print(f"{lost}; this one ends, too", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_LOST)


def refuse(problems: Sequence[str]) -> None:
    """Refuse to start if one process of this job does; all of them call it.

    Raises:
      RefusedError: with the problems of all.
    """
    everyones = leader().everyones("problems", list(problems))
    common = [line for line in everyones[0] if all(line in own for own in everyones)]
    found = common + [
        f"process {i}: {line}"
        for i, own in enumerate(everyones)
        for line in own
        if line not in common
    ]
    if found:
        raise RefusedError(found if len(everyones) > 1 else list(problems))


def require_equal(**values: Any) -> None:
    """Refuse to start where the processes of this job do not hold equal values.

    Raises:
      RefusedError: naming what differs, and where.
    """
    everyones = leader().everyones("same", values)
    found = [
        f"{name} of process {i} is not that of process 0: give all processes the same"
        for name in values
        for i, own in enumerate(everyones)
        if own[name] != everyones[0][name]
    ]
    if found:
        raise RefusedError(found, "the processes of this job differ")
