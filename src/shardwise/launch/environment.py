"""The rank of this process, from what torchrun, Open MPI or Slurm left in the environment.

`detect` translates the launcher's variables to the ones that torch reads (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
`LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`), or returns None where this process is no rank. torchrun's win, then
Open MPI's: `mpirun` inside a Slurm allocation starts its daemons as Slurm tasks, whose variables the ranks inherit. A
process that a scheduler started once a host, to start the ranks itself, is the subject of `shardwise.launch.hosts`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import MachineError
from shardwise.launch.hosts import detect_host, read_host, sagemaker_master
from shardwise.launch.slurm import is_step, read_step
from shardwise.launch.variables import (
    FIRST_PORT,
    LOOPBACK,
    PORTS,
    check_port,
    set_variables,
    text_of,
    whole_number_of,
)


@dataclass(frozen=True)
class RankEnvironment:
    """The place of this process among all ranks of the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    launcher: str  # "torchrun", "Open MPI" or "Slurm"

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size

    def variables(self) -> dict[str, str]:
        """As torch's `env://` and other libraries read them."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def detect() -> RankEnvironment | None:
    """This process's place, with torch's variables set in `os.environ`; None where no launcher started it."""
    environment = read_environment(os.environ)
    if environment is not None:
        os.environ.update(environment.variables())
    return environment


def is_first_process() -> bool:
    """Return whether this process is rank 0, or the one that starts it."""
    place, host = detect(), detect_host()
    return (host is None or host.index == 0) if place is None else place.rank == 0


def read_environment(variables: Mapping[str, str]) -> RankEnvironment | None:
    """`detect` on given variables, changing nothing. An empty variable is one that is not set."""
    variables = set_variables(variables)
    if read_host(variables) is not None:
        return None  # it is to start ranks: what looks like a rank is the number of its pod or task
    if "RANK" in variables:
        place = _torchrun(variables)
    elif "OMPI_COMM_WORLD_RANK" in variables:
        place = _open_mpi(variables)
    elif is_step(variables):
        place = _slurm(variables)
    else:
        return None
    _check(place)
    return place


def _torchrun(variables: Mapping[str, str]) -> RankEnvironment:
    world_size = whole_number_of(variables, "WORLD_SIZE")
    alone = world_size == 1
    return RankEnvironment(
        rank=whole_number_of(variables, "RANK"),
        world_size=world_size,
        local_rank=whole_number_of(variables, "LOCAL_RANK", 0),
        local_world_size=whole_number_of(variables, "LOCAL_WORLD_SIZE", 1),
        master_address=text_of(variables, "MASTER_ADDR", LOOPBACK if alone else None),
        master_port=whole_number_of(variables, "MASTER_PORT", FIRST_PORT if alone else None),
        launcher="torchrun",
    )


def _open_mpi(variables: Mapping[str, str]) -> RankEnvironment:
    world_size = whole_number_of(variables, "OMPI_COMM_WORLD_SIZE")
    local_size = whole_number_of(variables, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or ""
    return RankEnvironment(
        rank=whole_number_of(variables, "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=whole_number_of(variables, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local_size,
        master_address=variables.get("MASTER_ADDR")
        or sagemaker_master(variables)
        or text_of(variables, "MASTER_ADDR", LOOPBACK if local_size == world_size else None),
        master_port=whole_number_of(variables, "MASTER_PORT", FIRST_PORT + zlib.crc32(job.encode()) % PORTS),
        launcher="Open MPI",
    )


def _slurm(variables: Mapping[str, str]) -> RankEnvironment:
    step = read_step(variables)
    return RankEnvironment(
        rank=step.task,
        world_size=sum(step.tasks),
        local_rank=whole_number_of(variables, "SLURM_LOCALID"),
        local_world_size=step.tasks[step.node],
        master_address=step.master_address,
        master_port=step.master_port,
        launcher="Slurm",
    )


def _check(environment: RankEnvironment) -> None:
    for low, name, high, of in (
        (environment.rank, "rank", environment.world_size, "world size"),
        (environment.local_rank, "local rank", environment.local_world_size, "local world size"),
        (environment.local_world_size - 1, "local world size - 1", environment.world_size, "world size"),
    ):
        if low >= high:
            raise MachineError(
                f"{name} {low} from {environment.launcher} must be below {of} {high}; "
                "unset stale variables of another launcher or start all ranks with one launcher"
            )
    check_port(environment.master_port)
