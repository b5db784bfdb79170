"""Optimizers of this package against their one-process forms, on every axis; rows of 72 and 130 in blocks of 48."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from tests.parity.jobs import check_agrees, tensor_job
from tests.parity.test_experts import experts_job

WIDE = {"n_embd": 72, "n_inner": 130}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW8bit": {"options": {"block_size": 48}},
    "AdamWFp8": {"options": {"block_size": 48}},
    "AdamWBf16": {},
    "Adafactor": {},
    "Lion": {"learning_rate": 1e-4},
    "ScheduleFreeAdamW": {"schedule": "constant", "options": {"betas": [0.95, 0.99]}},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2, shard 2": (4, {"tensor_parallel_degree": 2}),
    "shard 4": (4, {}),
    "shard 3, uneven": (3, {}),
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "zero-1": (2, {"shard_optimizer_state": True}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "tensor 4, heads in copies": (4, {"tensor_parallel_degree": 4}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "pipeline 2, shard 2": (4, {"pipeline_parallel_degree": 2}),
    "tensor 2, pipeline 2": (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    "expert 2": (2, {"expert_parallel_degree": 2}),
    "expert 2, tensor 2": (4, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
}


def job_of(corpora: Path, name: str, parallel: dict[str, Any], layers: int = 2) -> Job:
    """A job of the optimizer `name`: GPT-2, whose fused projections are cut in sections, or experts."""
    optimizer = {"name": name, "weight_decay": 0.1, **OPTIMIZERS[name]}
    if "expert_parallel_degree" in parallel:
        config = {"experts_implementation": "eager", "hidden_size": 72, "moe_intermediate_size": 66}
        sections: dict[str, Any] = {"precision": {"compute": "fp64"}, "parallel": parallel, "optimizer": optimizer}
        return experts_job(corpora, "qwen3_moe", config=config, **sections)
    return tensor_job(corpora, "gpt2", config=WIDE, layers=layers, parallel=parallel, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_agrees_with_one_process(world_pool: WorldPool, corpora: Path, name: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    check_agrees(world_pool, ranks, job_of(corpora, name, parallel))
