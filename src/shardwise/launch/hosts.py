"""The place of this host among those of a job, where a scheduler starts one process a host and leaves the ranks to it.

So do Kubeflow's TrainJob and PyTorchJob, a JobSet, SkyPilot, SageMaker's containers, and Slurm with one task a node.
PyTorchJob sets RANK and WORLD_SIZE too, for a pod and not for a process: with several processes a pod, a process is a
rank only where LOCAL_RANK stands beside them. With an elasticPolicy it numbers no pod; their names do.
"""

from __future__ import annotations

import json
import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import MachineError
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

TORCHRUN_PORT = 29_500
SAGEMAKER_PORT = 7777
JOIN_SECONDS = 15 * 60.0  # a scheduler may start hosts and their names minutes apart
JOIN_TIMEOUT = re.compile(r"(?:^|,)\s*join_timeout\s*=\s*([^,]*)")  # in PET_RDZV_CONF
OF_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_RANK")  # only ranks have them


@dataclass(frozen=True)
class HostEnvironment:
    """A host whose ranks are to be started by this process.

    Attributes:
        index: of this host; the ranks of host 0 come first.
        hosts: how many there are.
        processes: ranks of each host; None: the scheduler leaves it open.
        master_address, master_port: of host 0, where the hosts meet.
        launcher: who has set the variables, for messages.
        least_hosts: with how many the job goes on, where hosts come and go; None: all of them stay.
        join_seconds: for which hosts wait for one another.
    """

    index: int
    hosts: int
    processes: int | None
    master_address: str
    master_port: int
    launcher: str
    least_hosts: int | None = None
    join_seconds: float = JOIN_SECONDS

    def refuse_elastic(self, what: str) -> None:
        """Refuse hosts that come and go for what they cannot be used for.

        Raises:
            MachineError: this is one of them.
        """
        if self.least_hosts is not None:
            raise MachineError(
                f"PET_NNODES={self.least_hosts}:{self.hosts}: {what} has no state to go on from when a host goes away; "
                f"start `shardwise train`, or set PET_NNODES={self.hosts}"
            )


def detect_host() -> HostEnvironment | None:
    """Return this host's place; None where this process is a rank itself, or no scheduler has started it."""
    return read_host(os.environ)


def read_host(variables: Mapping[str, str]) -> HostEnvironment | None:
    """Return what `detect_host` does of given variables. An empty variable is one that is not set.

    Raises:
        MachineError: a variable is missing or contradicts another.
    """
    variables = set_variables(variables)
    if any(name in variables for name in OF_RANKS):
        return None
    for reader in (_torchrun_variables, _skypilot, _sagemaker, _slurm):
        host = reader(variables)
        if host is not None:
            _check(host)
            return replace(host, join_seconds=_join_seconds(variables))
    return None


def _join_seconds(variables: Mapping[str, str]) -> float:
    """Read torchrun's option for how long hosts wait for one another: `join_timeout=60`, among others."""
    timeout = JOIN_TIMEOUT.search(variables.get("PET_RDZV_CONF", ""))
    if timeout is None:
        return JOIN_SECONDS
    if not timeout[1].strip().isdecimal() or not int(timeout[1]):
        raise MachineError(
            f"PET_RDZV_CONF={variables['PET_RDZV_CONF']}: join_timeout={timeout[1]} is no number of seconds from 1; "
            f"use e.g. join_timeout={JOIN_SECONDS:.0f}"
        )
    return float(timeout[1])


def _torchrun_variables(variables: Mapping[str, str]) -> HostEnvironment | None:
    """Read PET_*, the defaults of torchrun's options, which Kubeflow's controllers and JobSets give to each pod."""
    if "PET_NNODES" not in variables:
        return None
    least, hosts = _range_of_hosts(variables["PET_NNODES"])
    stays = least == hosts
    is_one_rank = variables.get("WORLD_SIZE") == str(hosts) and variables.get("PET_NPROC_PER_NODE") == "1"
    if stays and "RANK" in variables and is_one_rank:
        return None  # a pod of a PyTorchJob that is one rank
    first = "0" if hosts == 1 else None
    meeting, _, meeting_port = variables.get("PET_RDZV_ENDPOINT", "").partition(":")
    index = variables.get("PET_NODE_RANK") or variables.get("JOB_COMPLETION_INDEX") or _index_of_pod(variables, meeting)
    address = variables.get("PET_MASTER_ADDR") or variables.get("MASTER_ADDR") or meeting
    port = variables.get("PET_MASTER_PORT") or variables.get("MASTER_PORT") or meeting_port or str(TORCHRUN_PORT)
    place = _given(
        PET_NODE_RANK=index or first,
        PET_MASTER_ADDR=address or (LOOPBACK if hosts == 1 else None),
        PET_MASTER_PORT=port,
    )
    known = {**variables, **place}
    return HostEnvironment(
        index=whole_number_of(known, "PET_NODE_RANK"),
        hosts=hosts,
        processes=_processes(variables.get("PET_NPROC_PER_NODE")),
        master_address=text_of(known, "PET_MASTER_ADDR"),
        master_port=whole_number_of(known, "PET_MASTER_PORT"),
        launcher="the PET variables",
        least_hosts=None if stays else least,
    )


def _index_of_pod(variables: Mapping[str, str], meeting: str) -> str | None:
    """Return the number of a pod that only its name says: `run-worker-2`, where the meeting is at `run-worker-0`."""
    first = re.fullmatch(r"(.+)-0", meeting.partition(".")[0])
    name = variables.get("HOSTNAME") or socket.gethostname()
    own = re.fullmatch(rf"{re.escape(first[1])}-(\d+)(\..*)?", name) if first else None
    return own[1] if own else None


def _range_of_hosts(text: str) -> tuple[int, int]:
    """Return the fewest and the most hosts of a job; `2` is a job of two that stay."""
    least, _, most = text.partition(":")
    fewest = whole_number_of({"PET_NNODES": least}, "PET_NNODES")
    greatest = whole_number_of({"PET_NNODES": most or least}, "PET_NNODES")
    if not 0 < fewest <= greatest:
        raise MachineError(f"PET_NNODES={text}: the fewest hosts are at least 1 and at most the most; use e.g. 2:4")
    return fewest, greatest


def _processes(text: str | None) -> int | None:
    """Return the ranks of a host by torchrun's word for it; `auto` and `gpu` are as many as there are GPUs."""
    if text is None or text in ("auto", "gpu"):
        return None
    if text == "cpu":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return whole_number_of({"PET_NPROC_PER_NODE": text}, "PET_NPROC_PER_NODE")


def _skypilot(variables: Mapping[str, str]) -> HostEnvironment | None:
    if "SKYPILOT_NODE_RANK" not in variables:
        return None
    addresses = text_of(variables, "SKYPILOT_NODE_IPS").split()
    task = variables.get("SKYPILOT_TASK_ID", "")
    return HostEnvironment(
        index=whole_number_of(variables, "SKYPILOT_NODE_RANK"),
        hosts=whole_number_of(variables, "SKYPILOT_NUM_NODES", len(addresses)),
        processes=whole_number_of(variables, "SKYPILOT_NUM_GPUS_PER_NODE", 0) or None,
        master_address=variables.get("MASTER_ADDR") or addresses[0],
        master_port=whole_number_of(variables, "MASTER_PORT", FIRST_PORT + zlib.crc32(task.encode()) % PORTS),
        launcher="SkyPilot",
    )


def _sagemaker(variables: Mapping[str, str]) -> HostEnvironment | None:
    """Read SM_*, which the training toolkit, the SDK's own start and `shardwise` in a bare container set alike."""
    if "SM_HOSTS" not in variables or "SM_CURRENT_HOST" not in variables:
        return None
    hosts, current = _sagemaker_hosts(variables), variables["SM_CURRENT_HOST"]
    if current not in hosts:
        hosts = [current]  # of an instance group that is not trained on
    processes = _sagemaker_processes(variables)
    if len(hosts) == 1 and processes is None:
        return None  # a machine like any other
    return HostEnvironment(
        index=hosts.index(current),
        hosts=len(hosts),
        processes=processes,
        master_address=LOOPBACK if len(hosts) == 1 else sagemaker_master(variables) or hosts[0],
        master_port=whole_number_of(
            variables, "MASTER_PORT", whole_number_of(variables, "SM_MASTER_PORT", SAGEMAKER_PORT)
        ),
        launcher="SageMaker",
    )


def sagemaker_master(variables: Mapping[str, str]) -> str | None:
    """Return the host of rank 0 of a SageMaker job; None elsewhere. Hosts are sorted as words: algo-10, then algo-2."""
    if "SM_HOSTS" not in variables or "SM_CURRENT_HOST" not in variables:
        return None
    return variables.get("MASTER_ADDR") or variables.get("SM_MASTER_ADDR") or _sagemaker_hosts(variables)[0]


def _sagemaker_hosts(variables: Mapping[str, str]) -> list[str]:
    """Return the hosts that are trained on, sorted; where the job names instance groups for that, theirs."""
    names = _json(variables, "SM_DISTRIBUTION_INSTANCE_GROUPS", [])
    groups = _json(variables, "SM_INSTANCE_GROUPS_DICT", {})
    hosts = [host for name in names for host in groups.get(name, {}).get("hosts", [])]
    return sorted(hosts or _json(variables, "SM_HOSTS", []))


def _sagemaker_processes(variables: Mapping[str, str]) -> int | None:
    """Return the ranks of a host that the estimator or the trainer asked for."""
    framework = _json(variables, "SM_FRAMEWORK_PARAMS", {})
    distributed = _json(variables, "SM_DISTRIBUTED_CONFIG", {})
    count = framework.get("sagemaker_mpi_num_of_processes_per_host") or distributed.get("process_count_per_node")
    return None if count is None else int(count)


def _json(variables: Mapping[str, str], key: str, default: Any) -> Any:
    """Return a variable that holds JSON of the kind of `default`, which it is where there is no such variable."""
    try:
        value = json.loads(variables.get(key) or "null") or default
    except ValueError:
        value = None
    if not isinstance(value, type(default)):
        raise MachineError(f"{key}={variables[key]!r} is not a JSON {type(default).__name__}; SageMaker sets it so")
    return value


def _slurm(variables: Mapping[str, str]) -> HostEnvironment | None:
    """Read a step with one task a node; it is to start ranks where the task has several GPUs, or a count is given."""
    if not is_step(variables):
        return None
    step = read_step(variables)
    processes = _processes(variables.get("PET_NPROC_PER_NODE")) or _gpus_of_task(variables)
    if set(step.tasks) != {1} or processes <= 1:
        return None
    return HostEnvironment(
        index=step.node,
        hosts=len(step.tasks),
        processes=processes,
        master_address=step.master_address,
        master_port=step.master_port,
        launcher="Slurm",
    )


def _gpus_of_task(variables: Mapping[str, str]) -> int:
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    return len(visible.split(",")) if visible else whole_number_of(variables, "SLURM_GPUS_ON_NODE", 0)


def _given(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}


def _check(host: HostEnvironment) -> None:
    if host.index >= host.hosts:
        raise MachineError(
            f"host {host.index} from {host.launcher} must be below {host.hosts} hosts; unset stale variables of "
            "another scheduler"
        )
    if host.processes is not None and host.processes < 1:
        raise MachineError(f"{host.launcher}: {host.processes} processes a host; start at least one")
    check_port(host.master_port)
