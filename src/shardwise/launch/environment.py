"""The rank of this process, from what torchrun, Open MPI or Slurm left in the environment.

`detect` translates the launcher's variables to the ones that torch reads (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
`LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`), or returns None outside of a launcher. torchrun's win, then Open
MPI's: `mpirun` inside a Slurm allocation starts its daemons as Slurm tasks, whose variables the ranks inherit.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import MachineError

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20_000, 12_000  # below Linux's ephemeral ports, which start at 32768


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


def read_environment(variables: Mapping[str, str]) -> RankEnvironment | None:
    """`detect` on given variables, changing nothing. An empty variable is one that is not set."""
    variables = {name: value for name, value in variables.items() if value.strip()}
    if "RANK" in variables:
        place = _torchrun(variables)
    elif "OMPI_COMM_WORLD_RANK" in variables:
        place = _open_mpi(variables)
    elif "SLURM_PROCID" in variables and "SLURM_STEP_NUM_TASKS" in variables and "SLURM_PTY_PORT" not in variables:
        place = _slurm(variables)  # without a step it is the batch script, with a pty an interactive shell
    else:
        return None
    _check(place)
    return place


def _torchrun(variables: Mapping[str, str]) -> RankEnvironment:
    world_size = _integer(variables, "WORLD_SIZE")
    alone = world_size == 1
    return RankEnvironment(
        rank=_integer(variables, "RANK"),
        world_size=world_size,
        local_rank=_integer(variables, "LOCAL_RANK", 0),
        local_world_size=_integer(variables, "LOCAL_WORLD_SIZE", 1),
        master_address=_text(variables, "MASTER_ADDR", LOOPBACK if alone else None),
        master_port=_integer(variables, "MASTER_PORT", FIRST_PORT if alone else None),
        launcher="torchrun",
    )


def _open_mpi(variables: Mapping[str, str]) -> RankEnvironment:
    world_size = _integer(variables, "OMPI_COMM_WORLD_SIZE")
    local_size = _integer(variables, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or ""
    return RankEnvironment(
        rank=_integer(variables, "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=_integer(variables, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local_size,
        master_address=_text(variables, "MASTER_ADDR", LOOPBACK if local_size == world_size else None),
        master_port=_integer(variables, "MASTER_PORT", FIRST_PORT + zlib.crc32(job.encode()) % PORTS),
        launcher="Open MPI",
    )


def _slurm(variables: Mapping[str, str]) -> RankEnvironment:
    world_size = _integer(variables, "SLURM_STEP_NUM_TASKS")
    tasks = _tasks_of_each_node(_text(variables, "SLURM_STEP_TASKS_PER_NODE", str(world_size)))
    node = _integer(variables, "SLURM_NODEID", 0)
    if node >= len(tasks):
        raise MachineError(
            f"SLURM_NODEID={node} has no entry in SLURM_STEP_TASKS_PER_NODE, which lists {len(tasks)} nodes; "
            "start the job with srun so that both describe the same step"
        )
    job, step = _integer(variables, "SLURM_JOB_ID", 0), _integer(variables, "SLURM_STEP_ID", 0)
    return RankEnvironment(
        rank=_integer(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_integer(variables, "SLURM_LOCALID"),
        local_world_size=tasks[node],
        master_address=variables.get("MASTER_ADDR") or _slurm_master(variables, len(tasks)),
        master_port=_integer(variables, "MASTER_PORT", FIRST_PORT + (job + step) % PORTS),
        launcher="Slurm",
    )


def _slurm_master(variables: Mapping[str, str], nodes: int) -> str:
    """Rank 0's host: the step's first node. The launch node may be a login node, so it comes last."""
    if nodes == 1:
        return LOOPBACK
    for key in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if variables.get(key):
            return first_host(variables[key])
    return _text(variables, "SLURM_LAUNCH_NODE_IPADDR")


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: `node[003-005,7],login1` -> `node003`, `r[1-2]n[08,11]` -> `r1n08`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes.strip())
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else nodes)


def _tasks_of_each_node(text: str) -> list[int]:
    """Slurm's run-length list: `2(x3),1` -> [2, 2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise MachineError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list like '2(x3),1'; "
                "start the job with srun or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT yourself"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _text(variables: Mapping[str, str], key: str, default: str | None = None) -> str:
    value = variables.get(key) or default
    if value is None:
        others = ", ".join(sorted(k for k in variables if k.endswith(("RANK", "WORLD_SIZE", "PROCID"))))
        raise MachineError(
            f"{key} is not set although this process is one of several ranks ({others} are set); "
            f"set it on every rank, or unset the others to start local workers"
        )
    return value


def _integer(variables: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = _text(variables, key, None if default is None else str(default))
    if not text.isdecimal():
        raise MachineError(f"{key}={text!r} is not a whole number of 0 or more; the launcher must set it on every rank")
    return int(text)


def _check(found: RankEnvironment) -> None:
    for low, name, high, of in (
        (found.rank, "rank", found.world_size, "world size"),
        (found.local_rank, "local rank", found.local_world_size, "local world size"),
        (found.local_world_size - 1, "local world size - 1", found.world_size, "world size"),
    ):
        if low >= high:
            raise MachineError(
                f"{name} {low} from {found.launcher} must be below {of} {high}; "
                "unset stale variables of another launcher or start all ranks with one launcher"
            )
    if not 0 < found.master_port < 65536:
        raise MachineError(f"MASTER_PORT={found.master_port} is no TCP port; use one of 1 to 65535")
