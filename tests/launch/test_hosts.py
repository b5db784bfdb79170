"""What schedulers leave in the environment of one process a host, and what is made of it."""

from __future__ import annotations

import json

import pytest

from shardwise.errors import MachineError
from shardwise.launch.environment import read_environment
from shardwise.launch.hosts import HostEnvironment, read_host

TRAINJOB = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29500",
}
PYTORCHJOB = {
    "MASTER_ADDR": "run-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "16",
    "RANK": "1",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-managed-1",
}
SAGEMAKER = {"SM_HOSTS": '["algo-10","algo-2","algo-1"]', "SM_CURRENT_HOST": "algo-2"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[3-4]",
    "SLURM_GPUS_ON_NODE": "8",
}
TORCHRUN_RANK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}


def test_trainjob() -> None:
    assert read_host(TRAINJOB) == HostEnvironment(2, 4, 8, "run-node-0-0.run", 29_500, "the PET variables")
    assert read_environment(TRAINJOB) is None


def test_the_rank_of_a_pod_is_no_rank() -> None:
    assert read_host(PYTORCHJOB) == HostEnvironment(1, 2, 8, "run-master-0", 23_456, "the PET variables")
    assert read_environment(PYTORCHJOB) is None


def test_a_pod_of_one_process_is_a_rank() -> None:
    variables = PYTORCHJOB | {"WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "1"}
    assert read_host(variables) is None
    place = read_environment(variables)
    assert place is not None and (place.rank, place.world_size, place.one_host) == (1, 2, False)
    assert read_host(PYTORCHJOB | {"WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "auto"}) is not None


def test_ranks_that_torchrun_started_inherit_its_options() -> None:
    variables = TRAINJOB | TORCHRUN_RANK | {"MASTER_PORT": "1"}
    assert read_host(variables) is None
    place = read_environment(variables)
    assert place is not None and place.rank == 3


def test_jobset_may_leave_the_node_to_its_index() -> None:
    variables = {name: value for name, value in TRAINJOB.items() if name != "PET_NODE_RANK"}
    host = read_host(variables | {"JOB_COMPLETION_INDEX": "3"})
    assert host is not None and host.index == 3
    with pytest.raises(MachineError, match="PET_NODE_RANK is not set"):
        read_host(variables)


@pytest.mark.parametrize(("word", "processes"), [("auto", None), ("gpu", None), ("2", 2), (None, None)])
def test_processes_of_a_host(word: str | None, processes: int | None) -> None:
    host = read_host({"PET_NNODES": "1"} | ({} if word is None else {"PET_NPROC_PER_NODE": word}))
    assert host is not None and (host.index, host.hosts, host.processes) == (0, 1, processes)


def test_hosts_may_come_and_go() -> None:
    host = read_host(TRAINJOB | {"PET_NNODES": "2:4"})
    assert host is not None and (host.index, host.hosts, host.least_hosts) == (2, 4, 2)
    with pytest.raises(MachineError, match="PET_NNODES=2:4: a script has no state to go on from"):
        host.refuse_elastic("a script")
    stays = read_host(TRAINJOB | {"PET_NNODES": "4:4"})
    assert stays is not None and (stays.hosts, stays.least_hosts) == (4, None)
    with pytest.raises(MachineError, match="PET_NNODES=4:2: the fewest hosts"):
        read_host(TRAINJOB | {"PET_NNODES": "4:2"})


def test_how_long_hosts_wait_for_one_another() -> None:
    confs = {"": 900, "timeout=5,join_timeout=60": 60, "last_join_timeout=7": 900}
    hosts = [read_host(TRAINJOB | {"PET_RDZV_CONF": conf}) for conf in confs]
    assert [host and host.join_seconds for host in hosts] == [*confs.values()]
    with pytest.raises(
        MachineError, match="PET_RDZV_CONF=join_timeout=soon: join_timeout=soon is no number of seconds"
    ):
        read_host(TRAINJOB | {"PET_RDZV_CONF": "join_timeout=soon"})


def test_pods_of_an_elastic_pytorchjob_are_numbered_by_their_names() -> None:
    """The operator sets a range and a meeting point, and neither RANK nor PET_NODE_RANK."""
    variables = {
        "PET_RDZV_ENDPOINT": "run-worker-0:23456", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "1:3",
        "PET_NPROC_PER_NODE": "1", "HOSTNAME": "run-worker-2",
    }  # fmt: skip
    host = HostEnvironment(2, 3, 1, "run-worker-0", 23_456, "the PET variables", least_hosts=1)
    assert read_host(variables) == host
    assert read_host(variables | {"HOSTNAME": "run-worker-2.team.svc"}) == host
    labelled = read_host(variables | {"HOSTNAME": "node-7", "PET_NODE_RANK": "1"})
    assert labelled is not None and (labelled.index, labelled.master_address) == (1, "run-worker-0")
    with pytest.raises(MachineError, match="PET_NODE_RANK is not set"):
        read_host(variables | {"HOSTNAME": "node-7"})
    with_master = variables | {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "run-master-0", "PET_NODE_RANK": "0"}
    assert read_host(with_master) is not None and read_environment(with_master) is None


def test_skypilot() -> None:
    host = read_host(SKYPILOT)
    assert host is not None
    assert (host.index, host.hosts, host.processes, host.master_address) == (1, 2, 8, "10.0.0.1")
    other = read_host(SKYPILOT | {"SKYPILOT_NODE_RANK": "0"})
    assert other is not None and other.master_port == host.master_port


def test_sagemaker_sorts_hosts_as_words() -> None:
    assert read_host(SAGEMAKER) == HostEnvironment(2, 3, None, "algo-1", 7777, "SageMaker")
    mpi = SAGEMAKER | {"SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_num_of_processes_per_host": 4})}
    newer = SAGEMAKER | {"SM_DISTRIBUTED_CONFIG": json.dumps({"process_count_per_node": 4}), "MASTER_ADDR": "here"}
    assert [read_host(given).processes for given in (mpi, newer)] == [4, 4]  # type: ignore[union-attr]
    assert read_host(newer).master_address == "here"  # type: ignore[union-attr]


def test_a_single_host_of_sagemaker_is_a_machine_like_any_other() -> None:
    assert read_host({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}) is None


def test_sagemaker_trains_on_one_of_several_groups() -> None:
    groups = {"a": {"hosts": ["algo-2", "algo-3"]}, "b": {"hosts": ["algo-1"]}}
    variables = {
        "SM_HOSTS": '["algo-1","algo-2","algo-3"]',
        "SM_DISTRIBUTION_INSTANCE_GROUPS": '["a"]',
        "SM_INSTANCE_GROUPS_DICT": json.dumps(groups),
    }
    host = read_host(variables | {"SM_CURRENT_HOST": "algo-3"})
    assert host is not None and (host.index, host.hosts, host.master_address) == (1, 2, "algo-2")
    assert read_host(variables | {"SM_CURRENT_HOST": "algo-1"}) is None


def test_ranks_of_mpirun_on_sagemaker_know_their_master() -> None:
    variables = SAGEMAKER | {
        "OMPI_COMM_WORLD_RANK": "9",
        "OMPI_COMM_WORLD_SIZE": "24",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    }
    place = read_environment(variables)
    assert place is not None and (place.rank, place.master_address) == (9, "algo-1")


def test_slurm_with_one_task_a_node_and_several_gpus() -> None:
    assert read_host(SLURM) == HostEnvironment(1, 2, 8, "gpu3", 20_007, "Slurm")
    assert read_environment(SLURM) is None
    assert read_host(SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}).processes == 2  # type: ignore[union-attr]
    assert read_host(SLURM | {"SLURM_GPUS_ON_NODE": "0", "PET_NPROC_PER_NODE": "4"}).processes == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [{"SLURM_GPUS_ON_NODE": "1"}, {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NUM_TASKS": "16"}],
    ids=["one-gpu", "a-task-a-rank"],
)
def test_slurm_tasks_that_are_ranks(changes: dict[str, str]) -> None:
    assert read_host(SLURM | changes) is None
    assert read_environment(SLURM | changes) is not None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TRAINJOB | {"PET_NODE_RANK": "4"}, "host 4 from the PET variables must be below 4 hosts"),
        (TRAINJOB | {"PET_NPROC_PER_NODE": "0"}, "0 processes a host"),
        (TRAINJOB | {"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE='many' is not a whole number"),
        (TRAINJOB | {"PET_MASTER_PORT": "0"}, "MASTER_PORT=0 is no TCP port"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1' is not a JSON list"),
    ],
)
def test_broken_variables_of_hosts_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(MachineError, match=message):
        read_host(variables)
