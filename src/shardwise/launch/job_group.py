"""The process group of a job's ranks: which backend they join with, and the arithmetic that a rank computes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from shardwise.collectives import engine, hierarchical, registration
from shardwise.errors import MachineError
from shardwise.job.devices import CUDA
from shardwise.job.schema import Job
from shardwise.kernels.products import quick_products
from shardwise.kernels.sums import fp32_sums
from shardwise.launch.process_group import process_group
from shardwise.plan.plan import Plan, collective_algorithm

Say = Callable[[str], None]


@contextmanager
def job_group(job: Job, device_type: str, backend: str) -> Iterator[torch.device]:
    """Join the group of `job`'s ranks and yield this rank's device; inside, products and sums are as the job asks."""
    compute = job.precision.compute
    with (
        fp32_sums(device_type, compute),
        quick_products(device_type, compute),
        process_group(device_type, backend, job.parallel.timeout_seconds) as device,
    ):
        yield device


def usable_backend(plan: Plan, say: Say) -> str:
    """Return the backend to join with: the plan's, and how its collectives cross hosts (`collectives/hierarchical.py`).

    The engine is compiled; where that fails and the job leaves the choice to us, Gloo takes its place, on several hosts
    for all ranks, as they agree when they meet. Inside the hosts of two-level collectives over Gloo that choice is the
    engine too.

    Raises:
        MachineError: the engine fails and the job asks for it.
    """
    between = _built_backend(plan, say)
    if between != plan.backend:
        algorithm, _ = collective_algorithm(plan.job.parallel, between, plan.world)
        return hierarchical.backend_name(algorithm, between, between)
    inside = between
    if plan.collectives != "flat" and between == "gloo" and plan.job.parallel.ddp_dist_backend == "auto":
        inside = _built_backend(replace(plan, backend=registration.BACKEND), say)
    return hierarchical.backend_name(plan.collectives, between, inside)


def _built_backend(plan: Plan, say: Say) -> str:
    if plan.backend != registration.BACKEND:
        return plan.backend
    try:
        engine.build(say)
        return plan.backend
    except MachineError as error:
        if plan.world.device_type == CUDA:
            raise MachineError(f"{error}. The ranks share GPUs, which NCCL refuses; use a rank a GPU") from error
        if plan.job.parallel.ddp_dist_backend != "auto":
            raise
        say(f"note: the ranks talk over Gloo. {error}")
        return "gloo"
