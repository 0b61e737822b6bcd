"""The place of this process among those of its program, and how they meet.

`connect_processes` starts `jax.distributed`, then the devices. What the caller does not give it
reads from the launcher: Slurm, a Kubernetes JobSet or Indexed Job, Open MPI, MPICH, or the TPU
runtime. It differs from JAX's own detection where that one is wrong for training:

- A task that has its node for itself takes all GPUs of it. JAX takes one.
- The Jobs of a JobSet are one program. JAX makes one of each Job.
- Kubernetes is read from environment variables that the manifest sets, without a package, rights
  to the cluster's API, or a guess.
- Open MPI 5 and MPICH are known, on one host at least; on several, give the coordinator.

Slurm and Open MPI 4 are read here, too, since the coordinator's address must be known before JAX
starts. Where its port is taken, or the others do not come in time, JAX ends the process by a
signal. Here the port is tried before, and the time is kept outside of JAX.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import ipaddress
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from lowcomm_jax.mesh.leader import Leader, leader, listener

PORTS = 61440, 4096  # first, and how many: a job's port is one of them
HEARTBEAT_S = 25
LONGER_S = 600  # JAX, when it has waited for too long, aborts the process
NAME_S, DEVICES_S = 10.0, 300.0
"""Seconds for all devices to start: where a host's name leads nowhere, and else."""
TPU = "the TPU runtime"


@dataclasses.dataclass(frozen=True)
class Placement:
    """The place of a process among those of its program; fields are None where not known.

    Attributes:
      launcher: name of the launcher that says so.
      processes: how many there are.
      process: the number of this one, from 0.
      coordinator: HOST:PORT of process 0.
      neighbours: processes on this machine, this one included.
      local: number of this process among its neighbours.
      own_devices: whether the launcher shows this process only its own GPUs.
    """

    launcher: str
    processes: int | None = None
    process: int | None = None
    coordinator: str | None = None
    neighbours: int = 1
    local: int = 0
    own_devices: bool = False


def placement(env: Mapping[str, str] | None = None) -> Placement | None:
    """The placement by this process's launcher; None without a launcher, or with one process.

    Args:
      env: environment variables; None = those of this process.

    Raises:
      ValueError: variables of a launcher that cannot be read, or a Kubernetes manifest that leaves
        one out.
    """
    env = os.environ if env is None else env
    for read in (_kubernetes, _slurm, _open_mpi, _mpich, _tpu, _by_hand):
        found = read(env)
        if found is not None:
            return found if found.processes != 1 else None
    return None


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r}: a whole number is needed") from None


def _kubernetes(env: Mapping[str, str]) -> Placement | None:
    """A pod of an Indexed Job, alone or in a JobSet.

    Kubernetes itself sets `JOB_COMPLETION_INDEX`. The manifest sets `JAX_COORDINATOR_ADDRESS` and
    `JAX_PROCESS_COUNT`; in a JobSet also `JOB_INDEX` (label `job-global-index`) and
    `PROCESSES_IN_JOB`.
    """
    if "JOB_COMPLETION_INDEX" not in env or "KUBERNETES_SERVICE_HOST" not in env:
        return None
    if _tpu(env) is not None and "JAX_COORDINATOR_ADDRESS" not in env:
        return None
    needed = ["JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_COUNT"]
    if "JOBSET_NAME" in env or "JOB_INDEX" in env or "PROCESSES_IN_JOB" in env:
        needed += ["JOB_INDEX", "PROCESSES_IN_JOB"]
    missing = [name for name in needed if name not in env]
    if missing:
        raise ValueError(
            f"Kubernetes: the manifest must set {', '.join(missing)}; examples/jobset.yaml does"
        )
    process = _number(env, "JOB_COMPLETION_INDEX")
    if "JOB_INDEX" in env:
        process += _number(env, "JOB_INDEX") * _number(env, "PROCESSES_IN_JOB")
    count = _number(env, "JAX_PROCESS_COUNT")
    return Placement("Kubernetes", count, process, env["JAX_COORDINATOR_ADDRESS"])


def _slurm(env: Mapping[str, str]) -> Placement | None:
    """A task of a Slurm step, as `srun` starts it."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    if not all(name in env for name in needed):
        return None
    count = next((n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if n in env), None)
    if count is None:
        return None
    port = PORTS[0] + _number(env, "SLURM_JOB_ID") % PORTS[1]
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1"
    own = any(name in env for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"))
    return Placement(
        "Slurm",
        _number(env, count),
        _number(env, "SLURM_PROCID"),
        f"{first_host(env['SLURM_STEP_NODELIST'])}:{port}",
        neighbours=_tasks_of_node(tasks, int(env.get("SLURM_NODEID", 0))),
        local=_number(env, "SLURM_LOCALID"),
        own_devices=own,
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: `node[003-007,9],other` -> `node003`."""
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        raise ValueError(f"Slurm: {nodes!r} is not a list of nodes")
    return "".join(part or "" for part in found.groups())


def _tasks_of_node(text: str, node: int) -> int:
    """Of Slurm's `2(x3),1`: how many tasks node number `node` has."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts[node] if node < len(counts) else 1


def _open_mpi(env: Mapping[str, str]) -> Placement | None:
    """A process of Open MPI's `mpirun`, 4 or 5."""
    if "OMPI_COMM_WORLD_RANK" not in env or "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    count, near = _number(env, "OMPI_COMM_WORLD_SIZE"), env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    # Open MPI 4 says where its first process was started.
    uri = re.search(r"tcp6?://(?:\[([0-9a-f:]+)|([^,:]+))", env.get("OMPI_MCA_orte_hnp_uri", ""))
    first = uri and (f"[{uri[1]}]" if uri[1] else uri[2])
    host = "127.0.0.1" if int(near) == count else first
    return Placement(
        "Open MPI",
        count,
        _number(env, "OMPI_COMM_WORLD_RANK"),
        host and f"{host}:{_port(job)}",
        neighbours=int(near),
        local=int(env.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)),
    )


def _mpich(env: Mapping[str, str]) -> Placement | None:
    """A process of MPICH's or Intel's `mpiexec`."""
    if "PMI_RANK" not in env or "PMI_SIZE" not in env:
        return None
    count = _number(env, "PMI_SIZE")
    near = int(env.get("MPI_LOCALNRANKS", 1))
    job = env.get("PMI_PORT") or env.get("HYDI_CONTROL_FD", "") + str(os.getppid())
    host = "127.0.0.1" if near == count else None
    return Placement(
        "MPICH",
        count,
        _number(env, "PMI_RANK"),
        host and f"{host}:{_port(job)}",
        neighbours=near,
        local=int(env.get("MPI_LOCALRANKID", 0)),
    )


def _port(job: str) -> int:
    """A port derived from the job's name: equal in all its processes, mostly another in others."""
    number = int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest(), "little")
    return PORTS[0] + number % PORTS[1]


def _tpu(env: Mapping[str, str]) -> Placement | None:
    """A host of a TPU slice, or of several (MegaScale): JAX asks the runtime for the rest."""
    hosts = [name for name in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    slices = env.get("MEGASCALE_NUM_SLICES", "1")
    if len(hosts) < 2 and not (slices.isdigit() and int(slices) > 1):
        return None
    return Placement(TPU)


def _by_hand(env: Mapping[str, str]) -> Placement | None:
    """JAX's own variables, for any other launcher."""
    count = next((n for n in ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT") if n in env), None)
    if "JAX_COORDINATOR_ADDRESS" not in env or count is None or "JAX_PROCESS_ID" not in env:
        return None
    process = _number(env, "JAX_PROCESS_ID")
    return Placement("JAX_PROCESS_ID", _number(env, count), process, env["JAX_COORDINATOR_ADDRESS"])


# -- devices of this process ---------------------------------------------------------------------


def visible_gpus(env: Mapping[str, str] | None = None) -> int:
    """Number of GPUs that this process may see, without a call of the driver."""
    env = os.environ if env is None else env
    shown = env.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([name for name in shown.split(",") if name.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def devices_of(place: Placement, gpus: int) -> tuple[int, ...] | None:
    """Numbers of the GPUs that this process takes, among those it is shown; None = all.

    Processes of one machine that are shown the same GPUs get equal parts of them.

    Raises:
      ValueError: they cannot be cut into equal parts.
    """
    if place.neighbours < 2 or place.own_devices or gpus < place.neighbours:
        return None
    if gpus % place.neighbours:
        raise ValueError(
            f"{gpus} GPUs do not divide over the {place.neighbours} processes of this machine: "
            "start one process a machine, or one a GPU, or set CUDA_VISIBLE_DEVICES for each"
        )
    each = gpus // place.neighbours
    return tuple(range(place.local * each, (place.local + 1) * each))


def connect_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout_s: float = 60.0,
    heartbeat_s: int = HEARTBEAT_S,
) -> Placement | None:
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
      The placement used; None without a launcher and arguments: this is the only process.

    Raises:
      ValueError: arguments and launcher together do not give a place; names what is missing.
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
) -> Placement | None:
    """`connect_processes` without its second half: start `jax.distributed`, and no device."""
    known = placement()
    if known is None and coordinator is None and processes is None and process is None:
        return None
    place = known or Placement("the command line")
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    place = dataclasses.replace(place, **{k: v for k, v in given.items() if v is not None})
    if place.launcher != TPU:
        missing = [k for k in given if getattr(place, k) is None]
        if missing:
            said = "no launcher is known here" if known is None else f"{known.launcher} does not"
            raise ValueError(f"{', '.join(missing)} must be given: {said} say it")
    devices = devices_of(place, visible_gpus())
    if place.process == 0 and place.coordinator:
        _require_free(place.coordinator)
    # SIGTERM belongs to the training loop, which agrees with all processes on what to do.
    jax.config.update("jax_enable_preemption_service", False)
    given = {
        "coordinator_address": place.coordinator,
        "num_processes": place.processes,
        "process_id": place.process,
        "local_device_ids": devices,
        "cluster_detection_method": None if place.launcher == TPU else "deactivate",
        "heartbeat_timeout_seconds": heartbeat_s,
        "initialization_timeout": round(timeout_s) + LONGER_S,
    }
    _initialize(given, place, timeout_s)
    return place


def _initialize(given: dict[str, Any], place: Placement, timeout_s: float) -> None:
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
        except Exception as error:
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
