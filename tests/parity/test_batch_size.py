"""Steps that grow: each stage of `training.batch_size_schedule` computes what one process does, resumed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.data.loader import Stream
from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.observe.metrics import read_metrics
from shardwise.plan.step_sizes import SizeStage, StepSizes
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.world import WorldError, WorldPool
from shardwise.training.session import Session
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
    config = {"num_local_experts": 4} if family == "mixtral" else None
    return tensor_job(corpora, family, layers=2, config=config, parallel=parallel, training=keys)


def verified(pool: WorldPool, ranks: int, job: Job) -> VerifyReport:
    """Three steps of the job, one of each size."""
    report = pool.run(ranks, verify_one, job, 3, facts_of(job))[0]
    assert report is not None
    return report


@pytest.mark.parametrize(
    "layout", [name if name == "pipeline 2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_each_stage_is_what_one_process_computes(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    family, ranks, parallel = LAYOUTS[layout]
    report = verified(world_pool, ranks, growing(corpora, family, parallel))
    assert report.agrees, report.render()
    assert "lasts one step" in report.notes[-1]


def test_a_session_without_data_has_no_schedule() -> None:
    training = {"batch_size_schedule": [{"sequences_per_step": 1, "until_samples": 4}]}
    with pytest.raises(ConfigError, match="this session has none; leave it out"):
        Session(model=nn.Linear(2, 2), example={"input": torch.ones(2, 2)}, training=training)


@pytest.mark.slow
def test_an_epoch_ends_with_its_samples(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    keys = {"training": {"sequences_per_step": 40, "batch_size_schedule": SCHEDULE}}
    job = a_job(corpora, tmp_path / "run", **keys).model_dump(exclude_unset=True)
    del job["training"]["steps"]
    job["training"]["epochs"] = 1
    read = world_pool.run(2, train, Job.model_validate(job))[0].sources["data"]
    assert read["samples"] == read["sequences"] > 60
    sizes = [record["sequences"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in record]
    assert sizes[:5] == [4, 4, 6, 6, 40] and sum(sizes) == read["samples"]


def test_an_epoch_is_not_gone_on_in_other_steps(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    """They would end before its samples, or ask for more than there are."""

    def in_steps_of(size: int) -> Job:
        job = a_job(corpora, tmp_path / "run", training={"sequences_per_step": size}).model_dump(exclude_unset=True)
        del job["training"]["steps"]
        job["training"]["epochs"] = 1
        return Job.model_validate(job)

    world_pool.run(1, train, in_steps_of(40))
    world_pool.run(1, train, resumed(in_steps_of(40)))
    for size in (20, 80):
        with pytest.raises(WorldError, match=f"sequences_per_step={size}, .* in the place of epochs"):
            world_pool.run(1, train, resumed(in_steps_of(size)))


@pytest.mark.slow
def test_a_wrong_size_is_named(world_pool: WorldPool, corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that holds on to the first size at the second step, and one that takes the last size at once."""
    for ranks, sizes in ((1, (4, 4, 8)), (2, (8, 8, 8))):
        report = world_pool.run(ranks, verify_with_sizes, growing(corpora, "gpt2", {}), sizes)[0]
        assert report is not None
        assert not report.agrees


def verify_with_sizes(job: Job, sizes: tuple[int, ...]) -> VerifyReport | None:
    """Verify with steps of these sizes, whatever the job says."""
    right = Stream.__init__

    def wrong(self: Stream, *args: Any, **keys: Any) -> None:
        samples = [sum(sizes[:step]) for step in range(len(sizes))]
        stages = tuple(map(SizeStage, sizes, range(len(sizes)), samples))
        right(self, *args, **{**keys, "sizes": StepSizes(stages)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "__init__", wrong)
        return verify_one(job)


SCHEDULE_SAID = (
    r"batch_size_schedule=\[\{'until_samples': 7, 'sequences_per_step': 4\}, "
    r"\{'until_tokens': 300, 'sequences_per_step': 6\}\], the job has \[\]"
)
RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "3 ranks": (3, {}),
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
}


@pytest.mark.slow
def test_resumed_across_a_border_on_another_layout(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"dropout": 0.1}
    keys |= {"training": {"batch_size_schedule": SCHEDULE}}  # 4, 4, 6, 6, 8, 8
    job = resumed(a_job(corpora, tmp_path / "run", **keys), resume="none", keep_last=3)
    result = world_pool.run(1, train, job)[0]
    undisturbed, hashes = losses(job), data_hashes(job)
    assert result.sources["data"]["samples"] == 4 + 4 + 6 + 6 + 8 + 8
    for step in (2, 4):  # a stage is over after both
        for ranks, parallel in RESUMED.values():
            other = a_job(corpora, tmp_path / "run", **keys, parallel=parallel)
            cut(job, step)
            world_pool.run(ranks, train, resumed(other, keep_last=3))
            assert losses(job) == pytest.approx(undisturbed, rel=1e-9)
            assert data_hashes(job) == hashes
    with pytest.raises(WorldError, match=SCHEDULE_SAID):
        world_pool.run(2, train, resumed(a_job(corpora, tmp_path / "run", dropout=0.1)))
    evenly = a_job(corpora, tmp_path / "evenly", **{**keys, "training": {"sequences_per_step": 6}})
    world_pool.run(2, train, evenly)
    assert data_hashes(evenly)[-1] == hashes[-1]  # 36 samples, the same ones
