"""What a rank does to measure a job: training steps of the real code under LiveBytes, on random tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.config import Job
from shardwise.data.batch import Batch
from shardwise.families.build import build_model
from shardwise.families.discovery import discover
from shardwise.layout import Layout
from shardwise.observe.memory import LiveBytes
from shardwise.parallel.apply import parallelize
from shardwise.plan import Plan, resolve
from shardwise.planner.memory import MemoryEstimate, estimate
from shardwise.precision import LossScaler
from shardwise.training.init import initialize
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.program import make_program
from shardwise.training.setup import current_world
from shardwise.training.step import train_step


def measured_and_predicted(settings: dict[str, Any], steps: int = 2) -> tuple[int, MemoryEstimate]:
    """Peak live bytes of the last of `steps` steps on this rank, and what the formulas say."""
    torch.set_num_threads(1)
    job, device = Job.model_validate(settings), torch.device("cpu")
    facts = discover(build_model(job), job)
    plan = resolve(job, current_world(device), facts)
    model = parallelize(build_model(job), plan, Layout.from_plan(plan, dist.get_rank()), facts, device)
    initialize(model, seed=0)
    optimizer, program = ShardedOptimizer(model.tensor_map, job.optimizer), make_program(model)
    scaler = LossScaler.of(plan.dtypes.compute, job.precision.loss_scale)
    with LiveBytes(model.module, optimizer.inner) as memory:
        for step in range(steps):
            batches = [random_batch(plan, facts.vocabulary_size) for _ in range(plan.accumulation)]
            memory.reset_peak()
            train_step(model, program, batches, optimizer, scaler, step)
    return memory.peak, estimate(plan, facts)


def random_batch(plan: Plan, vocabulary: int) -> Batch:
    """One microbatch of random tokens."""
    tokens = torch.randint(0, vocabulary, (plan.microbatch, plan.sequence_length + 1))
    inputs = {"input_ids": tokens[:, :-1].contiguous()}
    return Batch(inputs, tokens[:, 1:].contiguous(), torch.arange(plan.microbatch))
