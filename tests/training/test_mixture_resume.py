"""A run on several sources, resumed on another layout, has the losses and samples of one that was left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.job.schema import Job
from shardwise.testing.world import WorldError, WorldPool
from tests.checkpoint.test_resume import a_job, resumed, train


def a_mixture(corpora: Path, output: Path, weights: dict[str, float], **more: Any) -> Job:
    """Six steps of 7 samples in fp64, with weights that change within them."""
    sources = []
    for name, weight in weights.items():
        path = output.parent / f"{name}.jsonl"
        path.write_text(
            "".join(json.dumps({"input_ids": [number + ord(name) % 7] * 20}) + "\n" for number in range(60))
        )
        sources.append({"path": str(path), "format": "tokens", "weight": weight})
    job = a_job(corpora, output, precision={"compute": "fp64"}, training={"sequences_per_step": 7}, **more)
    keys = {"path": None, "format": "auto", "sources": sources, "sequence_length": 16, "isolate_documents": False,
            "curriculum": [{"samples": 24, "weights": {"b": 3.0}}]}  # fmt: skip
    return Job.model_validate({**job.model_dump(), "data": {**job.data.model_dump(), **keys}})


def records(job: Job) -> dict[int, dict[str, Any]]:
    lines = (Path(job.output) / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines) if "loss" in record}


@pytest.mark.slow
def test_another_layout_goes_on_with_the_same_samples(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    weights = {"a": 2.0, "b": 1.0}
    whole = a_mixture(corpora, tmp_path / "whole", weights)
    world_pool.run(1, train, whole)
    for ranks in (2, 3):
        start = str(tmp_path / "whole" / "checkpoints" / "step-00000004")
        other = resumed(a_mixture(corpora, tmp_path / f"on{ranks}", weights), resume=start)
        result = world_pool.run(ranks, train, other)[0]
        for step, record in records(other).items():
            right = records(whole)[step]
            assert record["data_hash"] == right["data_hash"]
            assert record["loss"] == pytest.approx(right["loss"], rel=1e-9)
            assert record["passes/a"] == right["passes/a"]
        assert set(records(other)) == {5, 6} and result.sources["a"]["samples"] == 16 + 7
        assert {"validation_loss/a", "validation_loss/b"} <= result.metrics.keys()
    start = str(tmp_path / "whole" / "checkpoints" / "step-00000006")
    reweighted = a_mixture(corpora, tmp_path / "other", {"a": 1.0, "b": 1.0}).model_dump()
    reweighted["training"]["steps"] = 8
    with pytest.raises(WorldError, match=r"a had weight 2.*checkpoint.change_sources"):
        world_pool.run(2, train, resumed(Job.model_validate(reweighted), resume=start))
    allowed = resumed(Job.model_validate(reweighted), resume=start, change_sources=True)
    after = world_pool.run(2, train, allowed)[0]
    assert after.steps == 8
    assert sum(source["samples"] for source in after.sources.values()) == 8 * 7
