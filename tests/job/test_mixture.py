"""What a job says of several sources: what is refused by its keys alone, and the weights from each sample on."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.job.mixture import fault_of, weights_by_sample
from shardwise.job.sources import load_job

A, B = {"path": "a.jsonl"}, {"path": "b.jsonl"}
STREAM = A | {"weight": 1, "streaming": True}
WEIGHTED = [A | {"weight": 3}, B | {"weight": 1}]


def a_job(sources: list[dict[str, Any]], curriculum: list[dict[str, Any]] | None = None, **keys: Any) -> Any:
    return load_job({"data": {"sources": sources, "curriculum": curriculum or []}, **keys})


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (a_job([{"path": "*.jsonl"}]), "source 0 has no name"),
        (a_job([A, A]), "2 sources have the name 'a'"),
        (a_job([A, B], evaluation={"sets": {"b": "c.jsonl"}}), "'b' is the name of a source and of a set"),
        (a_job([A | {"weight": 1, "repeat": 2.0}]), "a has both weight and repeat"),
        (a_job([A | {"weight": 1}, B]), "a has a weight and b has none"),
        (a_job([A | {"repeat": 1.0}, B]), "a has a repeat and b has none"),
        (a_job([A | {"weight": 0}, B | {"weight": 0}]), "from sample 0 on are all 0"),
        (a_job([A | {"weight": 0}, B | {"weight": 1}]), "weight of 'a' is 0 throughout"),
        (a_job([A | {"weight": 1e-9}, B | {"weight": 1}]), "below one sample in 65,536,000"),
        (a_job([A, B], [{"samples": 9, "weights": {"a": 1}}]), "the sources have none"),
        (a_job(WEIGHTED, [{"weights": {"a": 1}}]), "begins at a sample, or at a token"),
        (a_job(WEIGHTED, [{"samples": 9, "weights": {}}]), "changes no weight"),
        (a_job(WEIGHTED, [{"samples": 9, "weights": {"c": 1}}]), "'c', which no source is"),
        (a_job(WEIGHTED, [{"samples": 9, "weights": {"a": 0, "b": 0}}]), "from sample 9 on are all 0"),
        (
            a_job(WEIGHTED, [{"samples": 9, "weights": {"a": 1}}, {"tokens": 300, "weights": {"a": 2}}]),
            "begins with sample 2, not behind 9",
        ),
        (a_job(WEIGHTED, training={"epochs": 1}), "training.epochs=1 has no end"),
        (a_job([A, B], checkpoint={"change_sources": True}), "passes are counted from the start"),
        (a_job([STREAM | {"weight": None}]), "a is a stream, and nobody has counted its samples"),
        (a_job([STREAM | {"dataset": "org/b"}]), "read from one place"),
        (a_job([STREAM | {"path": None, "name": "a"}]), "read from one place"),
        (a_job([STREAM | {"format": "chat"}]), "packed whole"),
        (a_job([STREAM | {"format": "text"}]), "read row by row from shards"),
        (a_job([STREAM | {"filter": {"a": 1}}]), "and has a filter"),
        (a_job([STREAM | {"dataset_split": "x"}]), "dataset_split of a is of a dataset"),
        (a_job([A | {"weight": 1, "dataset": "org/b"}]), "dataset of b is of a data set on the Hub"),
        (a_job([STREAM], training={"epochs": 1}), "training.epochs=1 has no end"),
    ],
)
def test_sources_that_cannot_be_mixed(job: Any, words: str) -> None:
    fault = fault_of(job)
    assert fault is not None and words in fault.because and fault.fix


def test_weights_of_a_curriculum() -> None:
    job = a_job(WEIGHTED, [{"samples": 9, "weights": {"a": 0}}, {"tokens": 256 * 20 + 1, "weights": {"a": 2, "b": 0}}])
    assert fault_of(job) is None
    hub = {"dataset": "org/name", "dataset_split": "test", "streaming": True, "weight": 1}
    assert fault_of(a_job([STREAM, hub, B | {"weight": 1}])) is None
    assert weights_by_sample(job.data) == [(0, {"a": 3, "b": 1}), (9, {"a": 0, "b": 1}), (21, {"a": 2, "b": 0})]
