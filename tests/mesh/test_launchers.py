"""Which process of how many this is, as launchers say it; and what is refused."""

import os
import socket
from pathlib import Path
from unittest import mock

import pytest

from lowcomm_jax.mesh import launchers
from lowcomm_jax.mesh.launchers import (
    TPU,
    ProcessPlace,
    connect_processes,
    parts_of_gpus,
    shown_gpus,
)

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[003-004,9]",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOBSET_NAME": "run",
    "JAX_COORDINATOR_ADDRESS": "run-region-0-0.run:1234",
    "JAX_PROCESS_COUNT": "8",
    "PROCESSES_IN_JOB": "4",
    "JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "2",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}


def place_of(env):
    """The place of a process with these variables alone."""
    with mock.patch.dict(os.environ, env, clear=True):
        return launchers.process_place()


def test_without_a_launcher_there_is_none():
    assert place_of({"PATH": "/bin"}) is None
    # A shell of an allocation is no task of a step.
    assert place_of({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) is None
    assert place_of({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}) is None
    # Nor is one that is the single task of an interactive step: other counts are the allocation's.
    assert place_of({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_slurm():
    assert place_of(SLURM) == ProcessPlace("Slurm", 6, 3, "node003:61441")
    elsewhere = {**SLURM, "SLURM_STEP_NODELIST": "node001,host2", "JAX_COORDINATOR_PORT": "1234"}
    assert place_of(elsewhere).coordinator == "node001:1234"


def test_the_jobs_of_a_jobset_are_one_program():
    found = place_of(JOBSET)
    assert (found.processes, found.process) == (8, 6)
    assert found.coordinator == "run-region-0-0.run:1234"


def test_an_indexed_job_alone():
    names = ("JOBSET_NAME", "JOB_INDEX", "PROCESSES_IN_JOB")
    found = place_of({k: v for k, v in JOBSET.items() if k not in names})
    assert (found.processes, found.process) == (8, 2)


@pytest.mark.parametrize("name", ["JAX_PROCESS_COUNT", "JOB_INDEX", "PROCESSES_IN_JOB"])
def test_a_manifest_that_leaves_something_out(name):
    with pytest.raises(ValueError, match=f"must set {name}"):
        place_of({k: v for k, v in JOBSET.items() if k != name})


def test_open_mpi_5_on_one_host():
    found = place_of(OPEN_MPI_5)
    host, port = found.coordinator.split(":")
    assert host == "127.0.0.1" and 61440 <= int(port) < 65536
    assert found.coordinator == place_of({**OPEN_MPI_5, "OMPI_COMM_WORLD_RANK": "0"}).coordinator
    assert (found.launcher, found.processes, found.process) == ("Open MPI", 4, 2)


def test_open_mpi_on_several_hosts():
    several = {**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert place_of(several).coordinator is None
    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    assert place_of({**several, **uri}).coordinator.startswith("10.96.0.1:")
    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp6://[fd00::7,fd01::7]:34911"}
    assert place_of({**several, **uri}).coordinator.startswith("[fd00::7]:")


def test_open_mpi_that_slurm_has_started_on_the_other_hosts():
    """There a task of Slurm is the daemon that starts Open MPI's processes."""
    several = {**SLURM, **OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    found = place_of({**several, "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.96.0.1:34911"})
    assert found == ProcessPlace("Open MPI", 4, 2, "10.96.0.1:61441")
    assert place_of(several) == ProcessPlace("Open MPI", 4, 2)


def test_mpich():
    found = place_of({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})
    assert (found.launcher, found.processes, found.process) == ("MPICH", 2, 1)


def test_tpu_hosts_are_left_to_jax():
    assert place_of({"TPU_WORKER_HOSTNAMES": "a,b"}) == ProcessPlace(TPU)
    slices = {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a"}
    assert place_of(slices) == ProcessPlace(TPU)
    assert place_of({"TPU_WORKER_HOSTNAMES": "localhost"}) is None


def test_by_variables_of_jax():
    env = {
        "JAX_COORDINATOR_ADDRESS": "a:1",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
    }
    found = place_of(env)
    assert (found.processes, found.process, found.coordinator) == (3, 2, "a:1")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID='x': a whole number"):
        place_of({**env, "JAX_PROCESS_ID": "x"})


@pytest.mark.parametrize(
    "env, gpus",
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, ["0", "1", "2"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, []),  # bound by the launcher
        ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_LOCAL_DEVICE_IDS": "1"}, []),  # and by the user
    ],
)
def test_gpus_that_a_process_may_share(env, gpus):
    with mock.patch.dict(os.environ, env, clear=True):
        machine, names = shown_gpus()
    assert names == gpus
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert machine == (f"{socket.gethostname()} {boot}" if gpus else "")


ALL = [str(i) for i in range(8)]


@pytest.mark.parametrize(
    "shown, parts",
    [
        ([("a", ALL), ("b", ALL)], [None, None]),  # one task a node takes all of it
        ([("a", ALL)] * 8, [(i,) for i in range(8)]),
        ([("a", ALL), ("b", ALL)] * 2, [range(4), range(4), range(4, 8), range(4, 8)]),
        ([("a", ["0", "1"]), ("a", ["2", "3"])], [None, None]),  # bound by the user
        ([("a", ["4", "5"])] * 2 + [("a", ["6", "7"])], [(0,), (1,), None]),
        ([("a", ["0"])] * 8, [None] * 8),
        ([("", [])] * 4, [None] * 4),
    ],
)
def test_gpus_of_every_process(shown, parts):
    assert parts_of_gpus(shown) == [part and tuple(part) for part in parts]


def test_gpus_that_do_not_divide():
    with pytest.raises(ValueError, match="8 GPUs do not divide over the 3 processes"):
        parts_of_gpus([("a", ALL)] * 3 + [("b", ALL)])


def test_alone_it_connects_nobody():
    assert connect_processes() is None


@pytest.mark.parametrize(
    "given, missing",
    [
        ({"processes": 2}, "coordinator, process must be given: no launcher is known"),
        ({"processes": 2, "process": 0}, "coordinator must be given"),
    ],
)
def test_a_place_that_is_not_whole(given, missing):
    with pytest.raises(ValueError, match=missing):
        connect_processes(**given)
