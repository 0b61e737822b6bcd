"""Which process of how many this is, as launchers say it; and what is refused."""

import pytest

from lowcomm_jax.mesh.launchers import (
    TPU,
    Placement,
    connect_processes,
    devices_of,
    first_host,
    placement,
    visible_gpus,
)

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[003-004,9]",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
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


def test_without_a_launcher_there_is_none():
    assert placement({"PATH": "/bin"}) is None
    # A shell of an allocation is no task of a step.
    assert placement({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) is None
    assert placement({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}) is None


def test_slurm():
    found = placement(SLURM)
    assert (found.processes, found.process, found.coordinator) == (6, 3, "node003:61441")
    assert (found.neighbours, found.local) == (2, 1)


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-015],host2", "node001"),
        ("node[007,009-015].cluster", "node007.cluster"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "tasks, node, neighbours", [("8", 0, 8), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4,1", 1, 1)]
)
def test_tasks_of_a_node(tasks, node, neighbours):
    env = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert placement(env).neighbours == neighbours


def test_the_jobs_of_a_jobset_are_one_program():
    found = placement(JOBSET)
    assert (found.processes, found.process) == (8, 6)
    assert found.coordinator == "run-region-0-0.run:1234"


def test_an_indexed_job_alone():
    names = ("JOBSET_NAME", "JOB_INDEX", "PROCESSES_IN_JOB")
    found = placement({k: v for k, v in JOBSET.items() if k not in names})
    assert (found.processes, found.process) == (8, 2)


@pytest.mark.parametrize("name", ["JAX_PROCESS_COUNT", "JOB_INDEX", "PROCESSES_IN_JOB"])
def test_a_manifest_that_leaves_something_out(name):
    with pytest.raises(ValueError, match=f"must set {name}"):
        placement({k: v for k, v in JOBSET.items() if k != name})


def test_open_mpi_5_on_one_host():
    found = placement(OPEN_MPI_5)
    host, port = found.coordinator.split(":")
    assert host == "127.0.0.1" and 61440 <= int(port) < 65536
    assert found.coordinator == placement({**OPEN_MPI_5, "OMPI_COMM_WORLD_RANK": "0"}).coordinator
    assert (found.processes, found.process, found.local) == (4, 2, 2)


def test_open_mpi_on_several_hosts():
    several = {**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert placement(several).coordinator is None
    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    assert placement({**several, **uri}).coordinator.startswith("10.96.0.1:")
    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp6://[fd00::7,fd01::7]:34911"}
    assert placement({**several, **uri}).coordinator.startswith("[fd00::7]:")


def test_mpich():
    found = placement({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})
    assert (found.launcher, found.processes, found.process) == ("MPICH", 2, 1)


def test_tpu_hosts_are_left_to_jax():
    assert placement({"TPU_WORKER_HOSTNAMES": "a,b"}) == Placement(TPU)
    slices = {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a"}
    assert placement(slices) == Placement(TPU)
    assert placement({"TPU_WORKER_HOSTNAMES": "localhost"}) is None


def test_by_variables_of_jax():
    env = {
        "JAX_COORDINATOR_ADDRESS": "a:1",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
    }
    found = placement(env)
    assert (found.processes, found.process, found.coordinator) == (3, 2, "a:1")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID='x': a whole number"):
        placement({**env, "JAX_PROCESS_ID": "x"})


def test_visible_gpus():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


@pytest.mark.parametrize(
    "neighbours, local, own, gpus, devices",
    [
        (1, 0, False, 8, None),  # one task a node takes all of it
        (8, 3, False, 8, (3,)),
        (2, 1, False, 8, (4, 5, 6, 7)),
        (8, 3, True, 1, None),  # bound by the launcher
        (8, 3, False, 1, None),  # bound by the user
        (4, 1, False, 0, None),
    ],
)
def test_devices_of_a_process(neighbours, local, own, gpus, devices):
    place = Placement("x", 8, 0, "a:1", neighbours, local, own)
    assert devices_of(place, gpus) == devices


def test_devices_that_do_not_divide():
    with pytest.raises(ValueError, match="8 GPUs do not divide over the 3 processes"):
        devices_of(Placement("x", 3, 0, "a:1", 3, 0), 8)


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
