"""The place of this process among those of its program, and how they meet.

`connect_processes` starts `jax.distributed`, then the devices. What the caller does not give it
takes from the launcher. Slurm and Open MPI 4 are detected by JAX (`compat.detected`), and TPU hosts
are left to it as a whole. It differs from JAX's own detection where that one is wrong for training:

- A task that has its node for itself takes all GPUs of it. JAX takes one. Processes that are shown
  the same GPUs of one machine share them, whatever launched them.
- The Jobs of a JobSet are one program. JAX makes one of each Job.
- Kubernetes is read from environment variables that the manifest sets, without a package, rights
  to the cluster's API, or a guess.
- Open MPI 5 and MPICH are known, on one host at least; on several, give the coordinator.

JAX reads neither `JAX_NUM_PROCESSES` nor `JAX_PROCESS_ID`: both are read here. So is whether this
is a TPU host, for which JAX asks a metadata server wherever libtpu is installed.

Where the coordinator's port is taken, or the others do not come in time, JAX ends the process by a
signal. Here the port is tried before, and the time is kept outside of JAX.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import ipaddress
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from lowcomm_jax import compat
from lowcomm_jax.mesh.leader import Leader, leader, listener

PORTS = 61440, 4096  # first, and how many: a job's port is one of them
HEARTBEAT_S = 25
LONGER_S = 600  # JAX, when it has waited for too long, aborts the process
NAME_S, DEVICES_S = 10.0, 300.0
"""Seconds for all devices to start: where a host's name leads nowhere, and else."""
TPU = "the TPU runtime"


@dataclasses.dataclass(frozen=True)
class ProcessPlace:
    """The place of a process among those of its program; fields are None where not known.

    Attributes:
      launcher: name of the launcher that says so.
      processes: how many there are.
      process: the number of this one, from 0.
      coordinator: HOST:PORT of process 0.
    """

    launcher: str
    processes: int | None = None
    process: int | None = None
    coordinator: str | None = None


def process_place() -> ProcessPlace | None:
    """The place of this process by its launcher; None without a launcher, or with one process.

    Raises:
      ValueError: variables of a launcher that cannot be read, or a Kubernetes manifest that leaves
        one out.
    """
    for read in (_kubernetes, _open_mpi, _slurm, _mpich, _tpu, _by_hand):
        found = read()
        if found is not None:
            return found if found.processes != 1 else None
    return None


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"{name}={os.environ[name]!r}: a whole number is needed") from None


def _kubernetes() -> ProcessPlace | None:
    """A pod of an Indexed Job, alone or in a JobSet.

    Kubernetes itself sets `JOB_COMPLETION_INDEX`. The manifest sets `JAX_COORDINATOR_ADDRESS` and
    `JAX_PROCESS_COUNT`; in a JobSet also `JOB_INDEX` (label `job-global-index`) and
    `PROCESSES_IN_JOB`.
    """
    env = os.environ
    if "JOB_COMPLETION_INDEX" not in env or "KUBERNETES_SERVICE_HOST" not in env:
        return None
    if _tpu() is not None and "JAX_COORDINATOR_ADDRESS" not in env:
        return None
    needed = ["JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_COUNT"]
    if "JOBSET_NAME" in env or "JOB_INDEX" in env or "PROCESSES_IN_JOB" in env:
        needed += ["JOB_INDEX", "PROCESSES_IN_JOB"]
    missing = [name for name in needed if name not in env]
    if missing:
        raise ValueError(
            f"Kubernetes: the manifest must set {', '.join(missing)}; examples/jobset.yaml does"
        )
    process = _number("JOB_COMPLETION_INDEX")
    if "JOB_INDEX" in env:
        process += _number("JOB_INDEX") * _number("PROCESSES_IN_JOB")
    count = _number("JAX_PROCESS_COUNT")
    return ProcessPlace("Kubernetes", count, process, env["JAX_COORDINATOR_ADDRESS"])


def _slurm() -> ProcessPlace | None:
    """A task of a Slurm step, as `srun` starts it and JAX detects it."""
    found = compat.detected("slurm")
    if found is None:
        return None
    place = ProcessPlace("Slurm", *found)
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        # JAX takes SLURM_NTASKS. It is the allocation's where `srun --preserve-env` has started
        # this process, as it does with an allocation's shell.
        place = dataclasses.replace(place, processes=_number("SLURM_STEP_NUM_TASKS"))
    return place


def _open_mpi() -> ProcessPlace | None:
    """A process of Open MPI's `mpirun`: of 4, as JAX detects it, or of 5."""
    if "OMPI_MCA_orte_hnp_uri" in os.environ:
        return ProcessPlace("Open MPI", *compat.detected("ompi"))
    names = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    return _mpi("Open MPI", *names, job=os.environ.get("PMIX_NAMESPACE", ""))


def _mpich() -> ProcessPlace | None:
    """A process of MPICH's or Intel's `mpiexec`."""
    env = os.environ
    job = env.get("PMI_PORT") or env.get("HYDI_CONTROL_FD", "") + str(os.getppid())
    return _mpi("MPICH", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", job=job)


def _mpi(launcher: str, size: str, rank: str, near: str, job: str) -> ProcessPlace | None:
    """By variables for the number of processes, of this one, and of those on this machine.

    Where all are on this machine, process 0 listens at a port that follows from the job's name.
    """
    if size not in os.environ or rank not in os.environ:
        return None
    count, together = _number(size), os.environ.get(near, "1") == os.environ[size]
    first = f"127.0.0.1:{_port(job)}" if together else None
    return ProcessPlace(launcher, count, _number(rank), first)


def _port(job: str) -> int:
    """A port derived from the job's name: equal in all its processes, mostly another in others."""
    number = int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest(), "little")
    return PORTS[0] + number % PORTS[1]


def _tpu() -> ProcessPlace | None:
    """A host of a TPU slice, or of several (MegaScale): JAX asks the runtime for the rest."""
    hosts = [name for name in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    slices = os.environ.get("MEGASCALE_NUM_SLICES", "1")
    if len(hosts) < 2 and not (slices.isdigit() and int(slices) > 1):
        return None
    return ProcessPlace(TPU)


def _by_hand() -> ProcessPlace | None:
    """JAX's own variables, for any other launcher."""
    env = os.environ
    count = next((n for n in ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT") if n in env), None)
    if "JAX_COORDINATOR_ADDRESS" not in env or count is None or "JAX_PROCESS_ID" not in env:
        return None
    process = _number("JAX_PROCESS_ID")
    return ProcessPlace("JAX_PROCESS_ID", _number(count), process, env["JAX_COORDINATOR_ADDRESS"])


# -- devices of this process ---------------------------------------------------------------------


_BOUND = "JAX_LOCAL_DEVICE_IDS", "SLURM_GPUS_PER_TASK"
"""Variables of a process to which its user or its launcher has given GPUs of its own."""


def shown_gpus() -> tuple[str, list[str]]:
    """This machine, and names of its GPUs that this process may share; no call of the driver."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        gpus = sorted(glob.glob("/dev/nvidia[0-9]*"))
    else:
        gpus = [name for name in named.split(",") if name.strip() not in ("", "-1")]
    # Slurm also sets the last one for processors (`cpu=8`).
    bound = "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    if not gpus or bound or any(name in os.environ for name in _BOUND):
        return "", []
    # The boot tells machines of one name apart; NCCL goes by both, too.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}", gpus


def parts_of_gpus(shown: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[int, ...] | None]:
    """Numbers of the GPUs that each process takes, among those it is shown; None = all.

    Processes of one machine that are shown the same GPUs get equal parts of them; where there are
    fewer GPUs than processes, each takes what it is shown.

    Args:
      shown: what `shown_gpus` gives in each process.

    Raises:
      ValueError: they cannot be cut into equal parts.
    """
    sharing: dict[tuple, list[int]] = {}
    for process, (machine, names) in enumerate(shown):
        sharing.setdefault((machine, *names), []).append(process)
    parts: list[tuple[int, ...] | None] = [None] * len(shown)
    for (_, *names), processes in sharing.items():
        gpus, each = range(len(names)), len(names) // len(processes)
        if len(processes) < 2 or not each:
            continue
        if len(names) % len(processes):
            raise ValueError(
                f"{len(names)} GPUs do not divide over the {len(processes)} processes of this "
                "machine: start one process a machine, or one a GPU, or set CUDA_VISIBLE_DEVICES "
                "for each"
            )
        for i, process in enumerate(processes):
            parts[process] = tuple(gpus[i * each : (i + 1) * each])
    return parts


def connect_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout_s: float = 60.0,
    heartbeat_s: int = HEARTBEAT_S,
) -> ProcessPlace | None:
    """Meet the other processes of this program; call it before JAX is used for anything else.

    It connects each process to the first one, and starts the devices of all (`start_devices`): set
    flags of XLA and options of JAX before.

    Args:
      coordinator: HOST:PORT of process 0, which listens there.
      processes: how many there are.
      process: number of this one, from 0. Arguments that are None come from the launcher.
      timeout_s: seconds to wait for the others.
      heartbeat_s: seconds for which a process that is cut off counts as alive.

    Returns:
      The place used; None without a launcher and arguments: this is the only process.

    Raises:
      ValueError: arguments and launcher together do not give a place; names what is missing. Or
        GPUs do not divide over the processes that are shown them.
      ConnectionError: this is process 0, and it cannot listen at the coordinator's port; or
        processes do not find one another, by which address.
      TimeoutError: other processes, or the coordinator, do not answer in time; names who is
        missing. This process can then only end.
    """
    place = meet_processes(
        coordinator, processes, process, timeout_s=timeout_s, heartbeat_s=heartbeat_s
    )
    if place is not None and leader().count > 1:
        start_devices(leader())
    return place


def meet_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout_s: float = 60.0,
    heartbeat_s: int = HEARTBEAT_S,
) -> ProcessPlace | None:
    """`connect_processes` without its second half: start `jax.distributed`, and no device.

    Processes that are shown the same GPUs settle here which of them each takes.
    """
    known = process_place()
    if known is None and coordinator is None and processes is None and process is None:
        return None
    place = known or ProcessPlace("the command line")
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    place = dataclasses.replace(place, **{k: v for k, v in given.items() if v is not None})
    if place.launcher != TPU:
        missing = [k for k in given if getattr(place, k) is None]
        if missing:
            said = "no launcher is known here" if known is None else f"{known.launcher} does not"
            raise ValueError(f"{', '.join(missing)} must be given: {said} say it")
    if place.process == 0 and place.coordinator:
        _require_free(place.coordinator)
    # SIGTERM belongs to the training loop, which agrees with all processes on what to do.
    jax.config.update("jax_enable_preemption_service", False)
    given = {
        "coordinator_address": place.coordinator,
        "num_processes": place.processes,
        "process_id": place.process,
        "cluster_detection_method": None if place.launcher == TPU else "deactivate",
        "heartbeat_timeout_seconds": heartbeat_s,
        "initialization_timeout": round(timeout_s) + LONGER_S,
    }
    _initialize(given, place, timeout_s)
    if compat.process_count() > 1:
        team = leader()
        part = parts_of_gpus(team.everyones("GPUs", shown_gpus()))[team.index]
        if part is not None:
            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, part)))
    return place


def _initialize(given: dict[str, Any], place: ProcessPlace, timeout_s: float) -> None:
    """`jax.distributed.initialize` on a thread: where it runs out of time, it ends the process."""
    ended = _on_thread(lambda: jax.distributed.initialize(**given))
    try:
        error = ended.get(timeout=timeout_s)
    except queue.Empty:
        who = f"this is process {place.process} of {place.processes}"
        if place.process and place.coordinator and not _answers(place.coordinator):
            found = f"nothing answers at the coordinator's address {place.coordinator} ({who})"
        else:
            found = f"not all processes have come to {place.coordinator or place.launcher} ({who})"
        raise TimeoutError(f"{found}; waited {timeout_s:.0f} s") from None
    if error is not None:
        raise error


def _require_free(coordinator: str) -> None:
    """Refuse a port at which another program listens: JAX would die of it without a word."""
    try:
        listener(int(coordinator.rpartition(":")[2])).close()
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) else error
        what = f"process 0 cannot listen at the port of {coordinator} ({reason})"
        raise ConnectionError(f"{what}: give another coordinator") from error


def _on_thread(act: Callable[[], Any]) -> queue.SimpleQueue[Exception | None]:
    """Call `act` on a thread; its error, or None, will be in the queue."""
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            act()
            ended.put(None)
        except Exception as error:  # for whoever waits to raise
            ended.put(error)

    threading.Thread(target=run, name="lowcomm-connect", daemon=True).start()
    return ended


def start_devices(team: Leader, wait_s: float = DEVICES_S) -> None:
    """Start the devices of all processes, and let them exchange a value; all call it together.

    On CPUs, processes look for one another at the address that each host's own name resolves to.

    Args:
      team: this process among the others.
      wait_s: seconds for both.

    Raises:
      ConnectionError: after 10 s, or an error, where the name of a host resolves to a loopback
        address: others do not find it there. Says which name, which address, and what to set.
      TimeoutError: devices have not exchanged a value in time.
      Exception: what JAX raises where devices do not start.
    """
    names = team.everyones("names", _name_problem(team.address_elsewhere()))
    found = list(dict.fromkeys(problem for problem in names if problem))  # a host has it once
    started = []

    def meet() -> None:
        started.append(jax.default_backend())
        multihost_utils.sync_global_devices("lowcomm_jax starts")

    ended = _on_thread(meet)
    try:
        try:
            error = ended.get(timeout=min(NAME_S, wait_s))
        except queue.Empty:
            # On accelerators a name only explains an error: their networks do not go by it.
            if found and started == ["cpu"]:
                raise
            error = ended.get(timeout=max(0.0, wait_s - NAME_S))
    except queue.Empty:
        what = "the devices of all processes have exchanged nothing"
        error = TimeoutError(f"{what}; waited {wait_s:.0f} s")
    if error is not None and found:
        raise ConnectionError("; ".join(found)) from error
    if error is not None:
        raise error


def _name_problem(address: str | None) -> str | None:
    """Why other hosts do not find this one, which has that address, by the name it gives itself."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        return f"the name of this host, {name}, has no address ({error.strerror})"
    if address is None or not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
        return None
    return (
        f"the name of this host, {name}, resolves to {found}, where other hosts do not find it; "
        f"write in its /etc/hosts `{address} {name}`, and remove {name} from the line of {found}"
    )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2.0):
            return True
    except OSError:
        return False
