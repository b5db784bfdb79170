"""What each launcher leaves in the environment, and what a process makes of it."""

from __future__ import annotations

import os

import pytest

from shardwise.errors import MachineError
from shardwise.launch.environment import RankEnvironment, detect, read_environment
from shardwise.launch.slurm import first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "rack[1-2]node[03-04],spare",
    "SLURM_JOB_NODELIST": "other[1-9]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}


def without(variables: dict[str, str], *keys: str) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key not in keys}


def test_no_launcher() -> None:
    assert read_environment({"PATH": "/bin", "WORLD_SIZE": "4"}) is None


def test_empty_variables_are_not_set() -> None:
    assert read_environment({"RANK": "", "WORLD_SIZE": "", "OMPI_COMM_WORLD_RANK": " ", "SLURM_PROCID": ""}) is None


def test_torchrun() -> None:
    assert read_environment(TORCHRUN) == RankEnvironment(5, 8, 1, 4, "node1", 1234, "torchrun")
    assert not read_environment(TORCHRUN).one_host


def test_one_rank_by_itself_needs_no_address() -> None:
    place = read_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert place is not None and place.one_host and place.master_address == "127.0.0.1"


def test_slurm_step() -> None:
    assert read_environment(SLURM) == RankEnvironment(6, 7, 0, 1, "rack1node03", 20_000 + 4713, "Slurm")
    assert (
        read_environment(SLURM | {"SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}).local_world_size == 2
    )


def test_slurm_address_and_port_are_the_same_on_every_rank() -> None:
    places = [
        read_environment(
            SLURM | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2), "SLURM_LOCALID": str(rank % 2)}
        )
        for rank in range(7)
    ]
    assert len({(place.master_address, place.master_port) for place in places}) == 1


def test_slurm_on_one_node_stays_on_the_loopback_interface() -> None:
    place = read_environment(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0", "SLURM_LOCALID": "6"})
    assert place.one_host and place.master_address == "127.0.0.1"


def test_slurm_address_without_a_step_list() -> None:
    assert read_environment(without(SLURM, "SLURM_STEP_NODELIST")).master_address == "other1"
    assert read_environment(without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")).master_address == "10.0.0.9"
    assert read_environment(SLURM | {"MASTER_ADDR": "mine", "MASTER_PORT": "99"}).master_address == "mine"


def test_slurm_batch_script_and_interactive_shell_are_no_ranks() -> None:
    assert read_environment(without(SLURM, "SLURM_STEP_NUM_TASKS")) is None
    assert read_environment(SLURM | {"SLURM_PTY_PORT": "4000"}) is None


def test_open_mpi() -> None:
    place = read_environment(OPEN_MPI)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 4, 1, 4)
    assert place.master_address == "127.0.0.1"
    assert place.master_port == read_environment(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}).master_port
    assert place.master_port != read_environment(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-78@1"}).master_port


def test_open_mpi_wins_over_the_slurm_task_it_runs_in() -> None:
    assert read_environment(SLURM | OPEN_MPI).launcher == "Open MPI"
    assert read_environment(SLURM | OPEN_MPI | TORCHRUN).launcher == "torchrun"


def test_open_mpi_on_several_hosts_needs_an_address() -> None:
    several = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(MachineError, match="MASTER_ADDR is not set"):
        read_environment(several)
    assert read_environment(several | {"MASTER_ADDR": "node7"}).master_address == "node7"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        (TORCHRUN | {"RANK": "eight"}, "RANK='eight' is not a whole number"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 from torchrun must be below world size 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 from torchrun must be below local world size 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "must be below world size 8"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no TCP port"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "'two' is not a list"),
        (SLURM | {"SLURM_NODEID": "4"}, "SLURM_NODEID=4 has no entry"),
    ],
)
def test_broken_variables_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(MachineError, match=message):
        read_environment(variables)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[003-005,7],login", "node003"),
        ("node[7,9]", "node7"),
        ("r[1-2]n[08,11]-ib,x", "r1n08-ib"),
        ("a-b[12]", "a-b12"),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_detect_sets_what_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in TORCHRUN:
        monkeypatch.delenv(key, raising=False)
    for key, value in SLURM.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    place = detect()
    assert place is not None and place.variables().items() <= os.environ.items()
    assert os.environ["MASTER_ADDR"] == "rack1node03" and os.environ["LOCAL_WORLD_SIZE"] == "1"
