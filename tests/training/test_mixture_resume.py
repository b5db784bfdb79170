"""A run on several sources, resumed on another layout, has the losses and samples of one that was left alone.

Its sources are tokenized before, or some of them are streams.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardwise.job.schema import Job
from shardwise.testing.world import WorldError, WorldPool
from tests.checkpoint.test_resume import a_job, resumed, train
from tests.parity.jobs import verify_one


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


def with_streams(corpora: Path, output: Path, weights: dict[str, float] | None = None) -> Job:
    """The same with two streams, c of which comes later, beside a corpus; their shards are written once."""
    sources: list[dict[str, Any]] = []
    for name, weight in (weights or {"a": 2.0, "b": 1.0, "c": 0.0}).items():
        directory = output.parent / name
        for number in range(0 if directory.is_dir() else 5):
            directory.mkdir(exist_ok=True)
            rows = [[row + ord(name) % 7, number, *range(20 - row % 3)] for row in range(12)]
            lines = "".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows)
            (directory / f"{number}.jsonl").write_text(lines)
        sources.append({"path": str(directory), "format": "tokens", "weight": weight, "streaming": name != "b"})
    job = a_job(corpora, output, precision={"compute": "fp64"}, training={"sequences_per_step": 7})
    keys = {"path": None, "format": "auto", "sources": sources, "sequence_length": 16, "shuffle_buffer_size": 4,
            "curriculum": [{"samples": 17, "weights": {"c": 1.5}}]}  # fmt: skip
    return Job.model_validate({**job.model_dump(), "data": {**job.data.model_dump(), **keys}})


@pytest.mark.slow
def test_streams_of_a_mixture_go_on_with_the_same_samples(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    whole = with_streams(corpora, tmp_path / "whole")
    world_pool.run(2, train, whole)
    right = records(whole)
    start = tmp_path / "whole" / "checkpoints" / "step-00000004"
    progress = json.loads((start / "manifest.json").read_text())["progress"]
    assert progress["sources"] == {"a": 17, "b": 7, "c": 4}
    assert progress["position"].keys() == {f"{name}/{key}" for name in "ac" for key in ("shard", "row", "tokens")}
    assert 0 < progress["position"]["a/tokens"] <= 17 * 16
    for ranks in (1, 3):
        other = resumed(with_streams(corpora, tmp_path / f"on{ranks}"), resume=str(start))
        result = world_pool.run(ranks, train, other)[0]
        assert set(records(other)) == {5, 6}
        for step, record in records(other).items():
            assert record["data_hash"] == right[step]["data_hash"]
            assert record["loss"] == pytest.approx(right[step]["loss"], rel=1e-9)
            assert record["passes/a"] == right[step]["passes/a"] and "stream_waited_seconds/c" in record
        assert result.sources["a"]["shards"] == 5 and result.sources["a"]["passes"] >= 0.2
        assert {"validation_loss/a", "validation_loss/b", "validation_loss/c"} <= result.metrics.keys()
    alone = with_streams(corpora, tmp_path / "alone")
    world_pool.run(1, train, alone)
    assert {step: record["data_hash"] for step, record in records(alone).items()} == {
        step: record["data_hash"] for step, record in right.items()
    }
    report = world_pool.run(2, verify_one, with_streams(corpora, tmp_path / "verified"), 3)[0]
    assert report is not None and report.agrees


@pytest.mark.slow
def test_streams_of_a_mixture_that_are_no_longer_what_they_were(
    world_pool: WorldPool, corpora: Path, tmp_path: Path
) -> None:
    weights = {"a": 2.0, "b": 1.0, "c": 1.0}
    whole = with_streams(corpora, tmp_path / "whole", weights)
    world_pool.run(1, train, whole)
    start = str(tmp_path / "whole" / "checkpoints" / "step-00000006")
    longer = with_streams(corpora, tmp_path / "longer", {"a": 1.0, "b": 1.0}).model_dump()
    longer["training"]["steps"], longer["data"]["curriculum"] = 8, []
    allowed = resumed(Job.model_validate(longer), resume=start, change_sources=True)
    result = world_pool.run(2, train, allowed)[0]  # c is left out, and a goes on where it was
    before = json.loads((Path(start) / "manifest.json").read_text())["progress"]
    last = tmp_path / "longer" / "checkpoints" / "step-00000008" / "manifest.json"
    after = json.loads(last.read_text())["progress"]
    assert result.sources["a"]["samples"] == after["sources"]["a"] == before["sources"]["a"] + 7
    assert {key: after["position"][key] for key in before["position"] if key.startswith("c/")} == {
        key: value for key, value in before["position"].items() if key.startswith("c/")
    }
    shorter = with_streams(corpora, tmp_path / "shorter", weights).model_dump()
    streams = [source for source in shorter["data"]["sources"] if source["streaming"]]
    shorter["data"] |= {"sequence_length": 8, "sources": streams, "curriculum": []}
    with pytest.raises(WorldError, match=r"set data.sequence_length to 16"):
        world_pool.run(1, train, resumed(Job.model_validate(shorter), resume=start, change_sources=True))
    shard = tmp_path / "a" / "3.jsonl"
    content, times = shard.read_text(), shard.stat()
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with pytest.raises(WorldError, match=r"source 'a' .*shard 3.jsonl is"):
        world_pool.run(1, train, resumed(with_streams(corpora, tmp_path / "other", weights), resume=start))
    shard.write_text(content[:-40] + "{" * 40)
    with pytest.raises(WorldError, match=r"data.sources, a: 3.jsonl, row 11"):
        world_pool.run(1, train, with_streams(corpora, tmp_path / "damaged", weights))
    shard.write_text(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "c").rename(tmp_path / "gone")
    (tmp_path / "c").mkdir()
    with pytest.raises(WorldError, match=r"data.sources, c: .*reads jsonl, parquet"):
        world_pool.run(1, train, with_streams(corpora, tmp_path / "vanished", weights))
