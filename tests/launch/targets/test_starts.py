"""The starts that manifests describe, run with the variables that each controller sets: two hosts on this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.job.sources import load_job
from shardwise.launch.launch_plan import LaunchPlan
from shardwise.launch.launcher import find_target, plan_for_target
from tests.launch.targets.jobs_for_launch import IMAGE

pytestmark = pytest.mark.slow
HOSTS = 2
TRAINING: dict[str, Any] = {
    "training": {"steps": 2, "sequences_per_step": 4},
    "data": {"sequence_length": 64, "max_documents": 20},
    "observe": {"sample": False, "tensorboard": False},
}


def trainers_variables(plan: LaunchPlan, index: int, port: int) -> dict[str, str]:
    """Return those of Kubeflow Trainer's torch policy."""
    return {
        "PET_NNODES": str(plan.nodes), "PET_NPROC_PER_NODE": str(plan.ranks_of_node), "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
    }  # fmt: skip


def operators_variables(plan: LaunchPlan, index: int, port: int) -> dict[str, str]:
    """Return those of the training operator: RANK is the pod's and WORLD_SIZE counts processes."""
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(index),
        "WORLD_SIZE": str(plan.nodes * plan.ranks_of_node), "PET_NODE_RANK": str(index),
        "PET_NNODES": str(plan.nodes), "PET_NPROC_PER_NODE": str(plan.ranks_of_node), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def skys_variables(plan: LaunchPlan, index: int, port: int) -> dict[str, str]:
    """Return SkyPilot's."""
    return {
        "SKYPILOT_NODE_RANK": str(index), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_NODES": str(plan.nodes), "SKYPILOT_NUM_GPUS_PER_NODE": "0", "SKYPILOT_TASK_ID": "sky-1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


def in_manifest(manifest: dict[str, Any], path: tuple[Any, ...]) -> Any:
    for part in path:
        manifest = manifest[part]
    return manifest


POD = ("template", "spec", "containers", 0)
STARTS: dict[str, tuple[str, tuple[Any, ...], Callable[[LaunchPlan, int, int], dict[str, str]]]] = {
    "trainjob": ("manifest.yaml", ("spec", "trainer"), trainers_variables),
    "pytorchjob": ("manifest.yaml", ("spec", "pytorchReplicaSpecs", "Master", *POD), operators_variables),
    "jobset": ("manifest.yaml", ("spec", "replicatedJobs", 0, "template", "spec", *POD), lambda plan, index, port: {}),
    "skypilot": ("task.yaml", (), skys_variables),
}


def words_of(target: str, part: dict[str, Any], job_file: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the variables of a container or task, the job file at its place on this machine."""
    if target == "skypilot":
        return part["run"].split(), dict(part["envs"])
    return part["command"], {each["name"]: each["value"] for each in part["env"] if "value" in each}


@pytest.mark.parametrize("target", STARTS)
def test_a_start_with_the_controllers_variables_trains(target: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cluster": "m5.xlarge:2"} | ({"image": IMAGE} if target != "skypilot" else {})
    job = load_job({**TRAINING, "launch": settings, "output": str(tmp_path / "run")}, environ={})
    plan = plan_for_target(job, target, "tiny")
    files = find_target(target).files(plan, tmp_path)
    (tmp_path / "job.yaml").write_text(files["job.yaml"])
    name, path, controller = STARTS[target]
    words, given = words_of(target, in_manifest(yaml.safe_load(files[name]), path), tmp_path / "job.yaml")
    assert words[:2] == ["shardwise", "train"] and words[2].endswith("job.yaml")
    command = [sys.executable, "-m", *words[:2], str(tmp_path / "job.yaml"), *words[3:]]
    port = free_port()
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    if target == "jobset":  # the host name of a pod is this machine, and the index comes from the field
        given |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    hosts = []
    for index in range(HOSTS):
        variables = {**os.environ, **own, **given, **controller(plan, index, port)}
        if target == "jobset":
            variables["PET_NODE_RANK"] = str(index)
        hosts.append(
            subprocess.Popen(
                command, env=variables, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    try:
        printed = [host.communicate(timeout=280)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(printed)
    assert re.search(r"step 2/2 ", printed[0]), printed[0]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
