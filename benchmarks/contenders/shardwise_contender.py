"""Shardwise's side of the training benchmarks: the same model and batch through its own Job, plan and `train_step`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Contender, Step
from benchmarks.workload import Workload, token_ids
from shardwise.data.batch import Batch
from shardwise.job.schema import Job
from shardwise.kernels.precision import LossScaler
from shardwise.kernels.products import quick_products
from shardwise.launch.heap import keep_freed_memory
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.parallel.apply import parallelize
from shardwise.parallel.layout import Layout
from shardwise.plan.plan import resolve
from shardwise.training.init import initialize
from shardwise.training.objectives.choose import make_objective
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.setup import current_world
from shardwise.training.step import train_step

KERNELS = ExitStack()  # of the process, to its end
SHARDWISE = Contender(
    "shardwise",
    "benchmarks.contenders.shardwise_contender:shardwise",
    "shardwise",
    "its defaults: parameters, gradients and optimizer state sharded over all ranks, head inside the loss",
)

ON_ENGINE = replace(
    SHARDWISE, name="shardwise, engine", settings=f"{SHARDWISE.settings}; its own backend", backend="shardwise"
)
AT_2 = replace(
    ON_ENGINE,
    name="shardwise at 2",
    build=f"{__name__}:shardwise_at_2",
    settings="the same, sharded over every two ranks",
)


def shardwise(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """The CPU benchmark's step."""
    return _data_parallel(workload, directory, rank, world, {})


def shardwise_at_2(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """The same, sharded over every two ranks."""
    return _data_parallel(workload, directory, rank, world, {"sharded_data_parallel_degree": 2})


def _data_parallel(workload: Workload, directory: Path, rank: int, world: int, parallel: dict[str, Any]) -> Step:
    trainable, ids = on_cpu(data_parallel_job(workload, directory, world, parallel=parallel)), token_ids(workload, rank)
    return lambda: trainable.step(ids)


def data_parallel_job(workload: Workload, directory: Path, world: int, **sections: dict[str, Any]) -> Job:
    """Return the job of the CPU benchmarks, sharded over all ranks; `sections` add to its own."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(directory), "attention": "sdpa"},
        "parallel": {"device": "cpu", "workers": world, "reshard_after_forward": workload.reshard},
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
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Job.model_validate(base)


def tensor_axis(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    return _axis(workload, directory, {"tensor_parallel_degree": world})


def pipeline_axis(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    return _axis(workload, directory, {"pipeline_parallel_degree": world}, microbatch=1)


def context_axis(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    return _axis(workload, directory, {"context_parallel_degree": world, "reshard_after_forward": workload.reshard})


def shard_axis(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    return _axis(workload, directory, {"reshard_after_forward": workload.reshard}, share=world)


def experts_axis(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    shared = {"expert_parallel_degree": world, "reshard_after_forward": workload.reshard}
    return _axis(workload, directory, shared, share=world)


def _axis(
    workload: Workload, directory: Path, parallel: dict[str, Any], microbatch: int | None = None, share: int = 1
) -> Step:
    """One step of `parallelism_cpu` on the whole batch, or on this rank's share of it."""
    rows = workload.batch // share
    job = Job.model_validate(
        {
            "model": {"path": str(directory), "attention": "sdpa"},
            "parallel": {"device": "cpu", **parallel},
            "precision": {"compute": "fp32"},
            "data": {"sequence_length": workload.sequence},
            "training": {"sequences_per_step": workload.batch, "microbatch_size": microbatch or rows},
            "optimizer": {
                "learning_rate": workload.learning_rate,
                "weight_decay": workload.weight_decay,
                "clip_norm": None,
                "schedule": "constant",
            },
        }
    )
    trainable = on_cpu(job)
    mine = token_ids(workload, 0).split(rows)[trainable.layout.data_rank]
    return lambda: trainable.step(*mine.split(microbatch or rows))


def on_cpu(job: Job) -> Trainable:
    """With what a worker of `shardwise train` has on a CPU beside its group, which here is the benchmark's own."""
    keep_freed_memory()
    KERNELS.enter_context(quick_products("cpu", job.precision.compute))
    return Trainable(job, torch.device("cpu"))


class Trainable:
    """`train_step` of a job on token ids that the caller brings."""

    def __init__(self, job: Job, device: torch.device) -> None:
        facts = discover(build_model(job), job)
        plan = resolve(job, current_world(device), facts)
        self.layout = Layout.from_plan(plan, dist.get_rank())
        self.model = parallelize(build_model(job), plan, self.layout, facts, device)
        initialize(self.model, job.training.seed)
        self.optimizer = ShardedOptimizer.of(self.model)
        self.scaler = LossScaler.of(plan.dtypes.compute, job.precision.loss_scale)
        self.objective: Any = make_objective(self.model)
        self.steps = 0

    def step(self, *ids: Tensor) -> Tensor:
        """One step on this rank's microbatches, ids [B, S] each; the loss of all ranks."""
        return self.run([causal_batch(each, self.layout.data_rank) for each in ids])

    def run(self, batches: list[Batch]) -> Tensor:
        """One step on this rank's microbatches; the loss of all ranks."""
        result = train_step(self.model, self.objective, batches, self.optimizer, self.scaler, self.steps)
        self.steps += 1
        return torch.tensor(result.loss)


def causal_batch(ids: Tensor, data_rank: int) -> Batch:
    """Labels aligned with the outputs; the last position has no next token and is not counted, as in transformers."""
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    rows = torch.arange(len(ids), device=ids.device) + data_rank * len(ids)
    return Batch(inputs={"input_ids": ids}, labels=labels, rows=rows)


def gpu_stepper(
    config: Any, device: torch.device, numbers: tuple[float, float, float], optimizer: str, more: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    """`step(ids)` of the GPU benchmark: one rank, bf16 compute, weights as `benchmarks.gpu_models.build` draws them.

    `more` holds sections of a Job, which are added to these.
    """
    from benchmarks.gpu_models import build

    learning_rate, weight_decay, clip_norm = numbers
    sections: dict[str, Any] = {
        "model": {"config": config.to_dict(), "attention": "sdpa"},
        "parallel": {"device": device.type, "workers": 1},
        "precision": {"compute": "bf16"},
        "data": {"sequence_length": config.max_position_embeddings},
        "training": {"sequences_per_step": 1},
        "optimizer": {
            "name": optimizer,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "clip_norm": clip_norm,
            "schedule": "constant",
        },
    }
    for name, values in more.items():
        sections[name] = {**sections.get(name, {}), **values}
    trainer = Trainable(Job.model_validate(sections), device)
    with torch.no_grad():
        for name, value in build(config, device).named_parameters():
            trainer.model.tensor_map[name].store(value)
    on_host = lru_cache(maxsize=1)(Tensor.cpu)  # where a job's batches come from; all steps have the same ids
    return lambda ids: trainer.step(on_host(ids))
