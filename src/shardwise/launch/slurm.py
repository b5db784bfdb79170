"""The Slurm step that this process is a task of, from the variables that `srun` sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import MachineError
from shardwise.launch.variables import FIRST_PORT, LOOPBACK, PORTS, text_of, whole_number_of


@dataclass(frozen=True)
class SlurmStep:
    """A task's place in its step.

    Attributes:
        task: number of the task in the step.
        node: number of its node in the step.
        tasks: how many tasks each node has.
        master_address, master_port: of the first node, equal on all tasks.
    """

    task: int
    node: int
    tasks: list[int]
    master_address: str
    master_port: int


def is_step(variables: Mapping[str, str]) -> bool:
    """Return whether this is a task of a step: the batch script itself and an interactive shell (a pty) are none."""
    return "SLURM_PROCID" in variables and "SLURM_STEP_NUM_TASKS" in variables and "SLURM_PTY_PORT" not in variables


def read_step(variables: Mapping[str, str]) -> SlurmStep:
    """Return the step of a task. Raises MachineError where variables are missing or contradict each other."""
    count = whole_number_of(variables, "SLURM_STEP_NUM_TASKS")
    tasks = _tasks_of_each_node(text_of(variables, "SLURM_STEP_TASKS_PER_NODE", str(count)))
    node = whole_number_of(variables, "SLURM_NODEID", 0)
    if node >= len(tasks):
        raise MachineError(
            f"SLURM_NODEID={node} has no entry in SLURM_STEP_TASKS_PER_NODE, which lists {len(tasks)} nodes; "
            "start the job with srun so that both describe the same step"
        )
    job, step = whole_number_of(variables, "SLURM_JOB_ID", 0), whole_number_of(variables, "SLURM_STEP_ID", 0)
    return SlurmStep(
        task=whole_number_of(variables, "SLURM_PROCID"),
        node=node,
        tasks=tasks,
        master_address=variables.get("MASTER_ADDR") or _first_node(variables, len(tasks)),
        master_port=whole_number_of(variables, "MASTER_PORT", FIRST_PORT + (job + step) % PORTS),
    )


def _first_node(variables: Mapping[str, str], nodes: int) -> str:
    """Rank 0's host: the step's first node. The launch node may be a login node, so it comes last."""
    if nodes == 1:
        return LOOPBACK
    for key in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if variables.get(key):
            return first_host(variables[key])
    return text_of(variables, "SLURM_LAUNCH_NODE_IPADDR")


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: `node[003-005,7],login1` -> `node003`, `r[1-2]n[08,11]` -> `r1n08`."""
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
