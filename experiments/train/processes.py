"""The processes of one job: how they meet, agree, refuse, and end when one of them is lost.

With `exchange=mesh` they are the whole run, one program over all its hosts; else they are one
region's job. Each runs the same command.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.console import Console

import lowcomm_jax
from experiments.cli import EXIT_REFUSED, RefusedError, refuse_any
from experiments.refusals import PROCESSES, Asked, run_problems
from experiments.regions.jobs import is_separate_job
from experiments.train import devices
from experiments.workdir import differences, of_program
from lowcomm_jax.checkpoint.load import package_versions
from lowcomm_jax.mesh import launchers
from lowcomm_jax.mesh.leader import ProcessLostError, leader

EXIT_LOST = 1
"""Exit code of a process whose job has lost another process."""
CANNOT_MEET = "cannot meet this job's processes"
MEET_S = 60.0
"""Seconds that the processes of one program wait for one another; launchers start them together."""
GRACE_S = 8.0
"""Seconds that a process may need to end by itself when it has lost another one."""


def start(fields: Mapping[str, Any]) -> None:
    """Meet the other processes of this job; with one process nothing happens.

    Raises:
      RefusedError: neither config nor launcher says which process this is, the devices do not
        divide over the processes, or the others do not come in time.
    """
    if run_problems(Asked(fields), PROCESSES) or not _several(fields):
        return  # `resolve` refuses, if anything is wrong
    count, separate = fields["processes"], is_separate_job(fields)
    try:
        place = launchers.process_place()
        devices.provide(fields["mesh"], count or (place and place.processes) or 1)
        met = launchers.meet_processes(
            fields["coordinator"],
            count or None,
            fields["process"],
            timeout_s=min(60 * fields["wait_minutes"], math.inf if separate else MEET_S),
        )
        if met is not None:
            leader().end_when_lost(GRACE_S, EXIT_LOST)
    except ValueError as error:
        raise RefusedError([str(error)], CANNOT_MEET) from error
    except OSError as error:
        # At once: JAX, which still waits, would end this process with a page of its own.
        print(f"{CANNOT_MEET}: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_REFUSED)
    if met is None:
        if count == 0:
            fix = "give processes, process and coordinator, the same coordinator in all of them"
            raise RefusedError([f"processes=0: no known launcher started this process; {fix}"])
        return
    try:
        launchers.start_devices(leader())
    except Exception as error:  # whatever a device's driver raises: the other processes wait
        if not isinstance(error, OSError):  # those of ours say all
            error = (
                f"process {leader().index}: {type(error).__name__}: {' '.join(str(error).split())}"
            )
        leader().end_all(f"{CANNOT_MEET}: {error}", EXIT_REFUSED)


def _several(fields: Mapping[str, Any]) -> bool:
    """Whether this job may have several processes."""
    count = fields["processes"]
    if count is None:
        # A job of one region is one process unless it says otherwise: a launcher may have started
        # all regions.
        given = fields["process"] is not None or fields["coordinator"] is not None
        return not is_separate_job(fields) and (given or launchers.process_place() is not None)
    return count != 1


def end(lost: ProcessLostError) -> NoReturn:
    """End this process at once; a normal exit would wait for the lost one (`jax.distributed`)."""
    print(f"{lost}; this one ends, too", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_LOST)


# -- agreeing at the start ---------------------------------------------------------------------


def refuse(problems: Sequence[str], fields: Mapping[str, Any]) -> None:
    """Refuse to start if one process of this job refuses, or if they differ; all of them call it.

    They compare config, versions, code and the number of their devices.

    Raises:
      RefusedError: with the problems of all.
    """
    if leader().count == 1:
        refuse_any(problems)
        return
    own = {
        "problems": list(problems),
        "config": of_program(fields),
        "versions": {"python": platform.python_version(), **package_versions()},
        "code": code_digest(),
        "devices": len(jax.local_devices()),
    }
    everyones = leader().everyones("start", own)
    found = _refused([one["problems"] for one in everyones])
    first = everyones[0]
    for i, other in enumerate(everyones[1:], 1):
        for name in ("config", "versions"):
            found += [
                f"{name} of processes 0 and {i} differ: {line}; give all of them the same"
                for line in differences(first[name], other[name])
            ]
        if other["code"] != first["code"]:
            found.append(
                f"code: process {i} runs another lowcomm_jax than process 0; install the same one"
            )
    most = max(one["devices"] for one in everyones)
    found += [
        f"devices: process {i} has found {one['devices']} of {most}; all need as many"
        for i, one in enumerate(everyones)
        if one["devices"] < most
    ]
    refuse_any(found)


def _refused(everyones: Sequence[Sequence[str]]) -> list[str]:
    """The problems of all processes; where not all have one, it names the process."""
    common = [line for line in everyones[0] if all(line in own for own in everyones)]
    return common + [
        f"process {i}: {line}"
        for i, own in enumerate(everyones)
        for line in own
        if line not in common
    ]


def code_digest() -> str:
    """Digest of the source files of the package."""
    root = Path(lowcomm_jax.__file__).parent
    found = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*.py")):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


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
    refuse_any(found, "the processes of this job differ")


def describe(console: Console, fields: Mapping[str, Any]) -> None:
    """Print how many devices were found, of how many, where there are several processes."""
    count = jax.process_count()
    if count == 1:
        return
    asked = devices.asked_for(fields["mesh"])
    expected = asked if asked > 1 else len(jax.local_devices()) * count
    console.print(
        f"processes {count}, devices found / expected: {jax.device_count()} / {expected}",
        highlight=False,
    )
