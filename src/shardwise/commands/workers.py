"""A function on every rank of a job: what commands other than `train` start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from shardwise.commands.train import plan_job
from shardwise.job.schema import Job
from shardwise.launch.environment import detect
from shardwise.launch.job_group import job_group, usable_backend
from shardwise.launch.local import run_local


def in_workers(job: Job, function: Callable[..., Any], *args: Any) -> Any:
    """Return rank 0's result of `function(job, device, *args)`, called on every rank.

    The ranks are a launcher's, each of which gets its own result, or the job's own local workers.
    """
    plan = plan_job(job)
    device_type = plan.world.device_type
    call = (job, device_type, usable_backend(plan, _note), function, args)
    if detect() is not None:
        return _worker(*call)
    return run_local(_worker, call, plan.world.size, device_type=device_type)[0]


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _worker(job: Job, device_type: str, backend: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with job_group(job, device_type, backend) as device:
        return function(job, device, *args)
