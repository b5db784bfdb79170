"""Optimizer state in host memory is one process's optimizer on every layout, and resumed with and without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.job.schema import Job
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.world import WorldPool
from shardwise.training.output import METRICS_FILE
from shardwise.training.trainer import train_rank
from tests.parity.jobs import tensor_job, verify_one

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "shard 4": ("gpt2", 4, {}),
    "shard 2, replica 2": ("gpt2", 4, {"sharded_data_parallel_degree": 2}),
    "zero-1": ("gpt2", 2, {"shard_optimizer_state": True}),
    "tensor 2": ("llama", 2, {"tensor_parallel_degree": 2}),
    "pipeline 2": ("gpt2", 2, {"pipeline_parallel_degree": 2}),
    "pipeline 2, backward in two": ("gpt2", 2, {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble"}),
    "tensor 2, pipeline 2": ("llama", 4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    "expert 2": ("mixtral", 2, {"expert_parallel_degree": 2}),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "clipped": {"optimizer": {"weight_decay": 0.1}, "memory": {"offload_optimizer": 0.6}},
    "beside backward": {
        "optimizer": {"clip_norm": None},
        "memory": {"offload_optimizer": True},
        "training": {"ema_decay": 0.75},
    },
    "averages, accumulated": {
        "optimizer": {"name": "ScheduleFreeAdamW", "schedule": "constant", "clip_norm": None},
        "memory": {"offload_optimizer": True},
        "training": {"gradient_accumulation": 2},
    },
}


def job_of(corpora: Path, layout: str, **sections: Any) -> Job:
    family, _, parallel = LAYOUTS[layout]
    config = {"num_local_experts": 4} if family == "mixtral" else {}
    training = {"steps": 4, "sequences_per_step": 8, **sections.pop("training", {})}
    return tensor_job(corpora, family, layers=2, config=config, parallel=parallel, training=training, **sections)


def verified(jobs: list[Job]) -> list[VerifyReport | None]:
    return [verify_one(job, 3) for job in jobs]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_agrees_with_one_process(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    jobs = [job_of(corpora, layout, **sections) for sections in OPTIMIZERS.values()]
    for name, report in zip(OPTIMIZERS, world_pool.run(LAYOUTS[layout][1], verified, jobs)[0], strict=True):
        assert report is not None and report.agrees, (name, report and (report.first, report.diagnosis))


def trained(job: Job) -> list[float]:
    Path(job.output).mkdir(parents=True, exist_ok=True)
    train_rank(job, torch.device("cpu"))
    lines = (Path(job.output) / METRICS_FILE).read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, then, onto", [(True, False, "shard 2, replica 2"), (False, 0.5, "tensor 2"), (0.5, True, "pipeline 2")]
)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_resumed_with_another_share_on_another_layout(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, first: float, then: float, onto: str, clip: float | None
) -> None:
    def job(layout: str, share: float, steps: int, output: str, resume: str = "none") -> Job:
        sections: dict[str, Any] = {
            "memory": {"offload_optimizer": share},
            "checkpoint": {"every": 2, "resume": resume},
        }
        parallel = LAYOUTS[layout][2]
        optimizer = {"clip_norm": clip, "schedule": "constant", "warmup_steps": 1}
        training = {"steps": steps, "sequences_per_step": 8}
        made = tensor_job(corpora, "llama", parallel=parallel, training=training, optimizer=optimizer, **sections)
        return made.model_copy(update={"output": str(tmp_path / output)})

    world_pool.run(4, trained, job("shard 4", first, 2, "resumed"))
    resumed = world_pool.run(LAYOUTS[onto][1], trained, job(onto, then, 4, "resumed", "auto"))[0]
    undisturbed = world_pool.run(1, trained, job("shard 4", False, 4, "whole"))[0]
    assert resumed == pytest.approx(undisturbed, rel=1e-9)
