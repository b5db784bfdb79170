"""Shardwise's side of the training benchmarks: the same model and batch through its own Job, plan and `train_step`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Contender, Step
from benchmarks.workload import Workload, token_ids
from shardwise.config import Job
from shardwise.data.batch import Batch
from shardwise.families.build import build_model
from shardwise.families.discovery import discover
from shardwise.layout import Layout
from shardwise.parallel.apply import parallelize
from shardwise.parallel.model import ParallelModel
from shardwise.plan import resolve
from shardwise.precision import LossScaler
from shardwise.training.init import initialize
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.program import make_program
from shardwise.training.setup import current_world
from shardwise.training.step import train_step

SHARDWISE = Contender(
    "shardwise",
    "benchmarks.contenders.shardwise_contender:shardwise",
    "shardwise",
    "its defaults: parameters, gradients and optimizer state sharded over all ranks, head inside the loss",
)


def shardwise(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """The CPU benchmark's step."""
    job = Job.model_validate(
        {
            "model": {"path": str(directory), "attention": "sdpa"},
            "parallel": {"device": "cpu", "workers": world},
            "precision": {"compute": "fp32"},
            "data": {"sequence_length": workload.sequence},
            "training": {"sequences_per_step": workload.batch * world, "microbatch_size": workload.batch},
            "optimizer": {
                "learning_rate": workload.learning_rate,
                "weight_decay": workload.weight_decay,
                "clip_norm": workload.clip_norm,
                "schedule": "constant",
            },
        }
    )
    step, _ = stepper(job, torch.device("cpu"), token_ids(workload, rank))
    return step


def stepper(job: Job, device: torch.device, ids: Tensor) -> tuple[Callable[[], Tensor], ParallelModel]:
    """A function that runs one `train_step` of `job` on the token ids [B, S] and returns the loss of all ranks."""
    facts = discover(build_model(job), job)
    plan = resolve(job, current_world(device), facts)
    layout = Layout.from_plan(plan, dist.get_rank())
    model = parallelize(build_model(job), plan, layout, facts, device)
    initialize(model, job.training.seed)
    optimizer = ShardedOptimizer(model.tensor_map, job.optimizer)
    scaler = LossScaler.of(plan.dtypes.compute, job.precision.loss_scale)
    program: Any = make_program(model)
    batch = causal_batch(ids, layout.data_rank)
    counter = iter(range(10**9))

    def step() -> Tensor:
        return torch.tensor(train_step(model, program, [batch], optimizer, scaler, next(counter)).loss)

    return step, model


def causal_batch(ids: Tensor, data_rank: int) -> Batch:
    """Labels aligned with the outputs; the last position has no next token and is not counted, as in transformers."""
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    rows = torch.arange(len(ids), device=ids.device) + data_rank * len(ids)
    return Batch(inputs={"input_ids": ids}, labels=labels, rows=rows)
