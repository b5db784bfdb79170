"""What the ranks of a world do that has GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise._torch_compat.groups import default_store
from shardwise.commands.verify import verify_rank
from shardwise.errors import CapacityError
from shardwise.job.schema import Job
from shardwise.launch import process_group as process_groups
from shardwise.launch.environment import detect
from shardwise.testing.comparison import VerifyReport
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.output import METRICS_FILE
from shardwise.training.setup import study
from shardwise.training.trainer import train_rank
from tests.smp import scripts, sharded_scripts


def joined(function: Callable[..., Any], argument: Any, backend: str = "nccl") -> Any:
    """`function(device, argument)` in the session of a worker: each with a GPU of its own, or all with one."""
    place = detect()
    assert place is not None
    store = default_store()
    dist.destroy_process_group()
    process_groups._stores[place] = dist.PrefixStore("with GPUs", store)
    process_groups._groups.clear()
    if place.world_size > torch.cuda.device_count() and "PLAYED_CUDA" not in os.environ:
        backend = "shardwise"  # real GPUs, fewer than ranks
    os.environ["PLAYED_GPU"] = str(place.rank if backend == "nccl" else 0)  # NCCL takes one rank of each
    with process_groups.process_group("cuda", backend) as device:
        return function(device, argument)


def verified(device: torch.device, job: Job) -> VerifyReport | None:
    return verify_rank(job, device, 2, study(job))


def first_api(device: torch.device, script: tuple[dict[str, Any], str]) -> tuple[float, float]:
    """Errors of losses and weights of a script of SMP version 1."""
    return scripts.train(*script)


def second_api(device: torch.device, script: tuple[dict[str, Any], str, str]) -> tuple[float, float, float]:
    """Errors of losses, norms and weights of a script of SMP version 2, whose inputs and FSDP are on the GPU."""
    on_gpu = scripts.batches().to(device)
    with (
        mock.patch.object(sharded_scripts, "batches", lambda: on_gpu),
        mock.patch.object(sharded_scripts, "wrap", partial(sharded_scripts.wrap, device_id=device)),
    ):
        return sharded_scripts.train(*script)


def trained(device: torch.device, jobs: list[Job]) -> list[dict[str, Any]]:
    """The records of jobs that train one after the other, each as `shardwise train` has a rank do it."""
    records: list[dict[str, Any]] = []
    for job in jobs:
        Path(job.output).mkdir(parents=True, exist_ok=True)
        train_rank(job, device)
        records = [json.loads(line) for line in (Path(job.output) / METRICS_FILE).read_text().splitlines()]
    return records


def trained_on_cpu(jobs: list[Job]) -> list[dict[str, Any]]:
    return trained(torch.device("cpu"), jobs)


def starved(device: torch.device, jobs: list[Job]) -> str:
    """What a run says whose optimizer finds no memory."""
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with mock.patch.object(ShardedOptimizer, "step", side_effect=error), pytest.raises(CapacityError) as caught:
        trained(device, jobs)
    return str(caught.value)
