"""Steps that grow: each stage of `training.batch_size_schedule` computes what one process does, resumed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.data.loader import Stream
from shardwise.job.schema import Job
from shardwise.plan.step_sizes import SizeStage, StepSizes
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.world import WorldPool
from tests.checkpoint.test_resume import a_job, cut, data_hashes, losses, resumed, train
from tests.parity.jobs import facts_of, tensor_job, verify_one

# Steps of 4, 4, 6, 6 and 8 sequences; those of 6 leave padding on 4 data ranks.
SCHEDULE = [{"sequences_per_step": 4, "until_samples": 7}, {"sequences_per_step": 6, "until_tokens": 300}]
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("gpt2", 1, {}),
    "shard 4": ("gpt2", 4, {}),
    "shard 2, replica 2": ("gpt2", 4, {"sharded_data_parallel_degree": 2}),
    "zero-1": ("gpt2", 2, {"shard_optimizer_state": True}),
    "tensor 2": ("llama", 2, {"tensor_parallel_degree": 2}),
    "context 2": ("llama", 2, {"context_parallel_degree": 2}),
    "pipeline 2": ("gpt2", 2, {"pipeline_parallel_degree": 2}),
    "zero bubble": ("gpt2", 2, {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble"}),
    "simple, virtual": ("gpt2", 2, {"pipeline_parallel_degree": 2, "pipeline": "simple"}),
    "tensor 2, pipeline 2": ("llama", 4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    "pipeline 2, shard 2": ("gpt2", 4, {"pipeline_parallel_degree": 2}),
    "expert 2": ("mixtral", 2, {"expert_parallel_degree": 2}),
}


def growing(corpora: Path, family: str, parallel: dict[str, Any], **training: Any) -> Job:
    keys = {"steps": 5, "sequences_per_step": 8, "batch_size_schedule": SCHEDULE, **training}
    return tensor_job(corpora, family, layers=2, parallel=parallel, training=keys)


def verified(pool: WorldPool, ranks: int, job: Job) -> VerifyReport:
    """Three steps of the job, one of each size."""
    report = pool.run(ranks, verify_one, job, 3, facts_of(job))[0]
    assert report is not None
    return report


@pytest.mark.parametrize(
    "layout", [name if name == "pipeline 2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_each_stage_is_one_processs(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    family, ranks, parallel = LAYOUTS[layout]
    report = verified(world_pool, ranks, growing(corpora, family, parallel))
    assert report.agrees, report.render()
    assert "lasts one step" in report.notes[-1]
