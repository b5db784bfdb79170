"""The best evaluation by any metric, the early end of a run, and that a resumed run goes on counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.checkpoint.catalog import checkpoints
from shardwise.checkpoint.manifest import Progress
from shardwise.checkpoint.stores import checkpoint_store
from shardwise.errors import ConfigError
from shardwise.job.schema import EvaluationSection, Job
from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.metrics import Record, read_metrics
from shardwise.testing.world import WorldPool
from shardwise.training.best_metric import early_stop, judged, metric_of
from shardwise.training.session import TrainingResult
from shardwise.training.trainer import train_rank
from tests.parity.jobs import make_job

SCORES = {1: 0.2, 2: 0.6, 3: 0.5, 4: 0.61, 5: 0.9, 6: 0.1}


class Scores(Callback):
    """Adds a metric to the record of each evaluation, on rank 0 alone."""

    rank_zero_only = True

    def on_evaluation(self, session: ObservedSession, record: Record) -> None:
        record["score"] = SCORES[record["step"]]


@pytest.mark.parametrize(
    ("settings", "values", "best", "waited"),
    [
        ({}, [3.0, 2.0, 2.5, 1.5], (1.5, 4), 0),
        ({}, [3.0, 2.0, 2.0, float("nan")], (2.0, 2), 2),
        ({"early_stopping_threshold": 0.5}, [3.0, 2.6, 2.4], (2.4, 3), 0),
        ({"metric": "accuracy"}, [0.5, 0.75, 0.7], (0.75, 2), 1),
        ({"metric": "perplexity", "greater_is_better": False}, [5.0, 4.0], (4.0, 2), 0),
        ({}, [float("nan")], (None, 0), 1),
    ],
)
def test_better(settings: dict[str, Any], values: list[float], best: tuple[float | None, int], waited: int) -> None:
    section = EvaluationSection(**settings)
    progress = Progress()
    for step, value in enumerate(values, 1):
        progress = judged(progress.model_copy(update={"step": step}), value, section)
    assert (progress.best_metric, progress.best_step) == best
    assert progress.evaluations_since_best == waited


def test_a_run_ends_when_it_has_waited() -> None:
    section = EvaluationSection(early_stopping_patience=2)
    progress = Progress(step=9, judged_by="validation_loss", best_metric=1.25, best_step=3, evaluations_since_best=1)
    assert early_stop(progress, section) is None
    later = progress.model_copy(update={"evaluations_since_best": 2})
    assert early_stop(later, section) == "no better validation_loss than 1.2500 at step 3 in 2 evaluations"
    assert early_stop(later, EvaluationSection()) is None
    other = section.model_copy(update={"metric": "score"})
    assert early_stop(later, other) is None
    assert judged(later, 0.5, other).best_metric == 0.5


def metric(record: Record) -> float | str:
    try:
        return metric_of(record, EvaluationSection(metric="accuracy"), torch.device("cpu"))
    except ConfigError as error:
        return str(error)


def scored_job(corpora: Path, output: Path, **checkpoint: Any) -> Job:
    job = make_job(
        corpora, layers=1, training={"steps": 6, "evaluate_every": 1, "callbacks": [f"{__name__}:Scores"]},
        evaluation={"metric": "score", "early_stopping_patience": 1, "early_stopping_threshold": 0.05},
        checkpoint={"every": 1, "keep_last": 1, "keep_best": True, **checkpoint},
        observe={"tensorboard": False, "sample": False},
    )  # fmt: skip
    return job.model_copy(update={"output": str(output)})


def train(job: Job) -> TrainingResult:
    Path(job.output).mkdir(parents=True, exist_ok=True)
    return train_rank(job, torch.device("cpu"))


def test_a_run_ends_early_by_a_callbacks_metric(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = scored_job(corpora, tmp_path / "run")
    for result in world_pool.run(2, train, job):
        assert (result.steps, result.stopped) == (3, None)
        assert result.early_stop == "no better score than 0.6000 at step 2 in 1 evaluation"
    assert (tmp_path / "run/model/model.safetensors").exists()
    assert checkpoints(checkpoint_store(job)) == ["step-00000003", "step-00000002"]
    records = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if "score" in record]
    assert [record["score"] for record in records] == [0.2, 0.6, 0.5]
    again = world_pool.run(2, train, scored_job(corpora, tmp_path / "run", resume="auto"))[0]
    assert again.steps == 3  # the state of a run that has ended is part of its checkpoint
    assert again.early_stop == "no better score than 0.6000 at step 2 in 1 evaluation"  # it is not judged twice
    records = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if "validation_loss" in record]
    assert [record["step"] for record in records] == [1, 2, 3]  # nor recorded
    for number in (torch.tensor(0.5), np.float32(0.5)):
        assert world_pool.run(1, metric, {"accuracy": number, "step": 3})[0] == 0.5
    assert world_pool.run(1, metric, {"acuracy": 0.5, "step": 3})[0] == (
        "evaluation.metric='accuracy' is no number of the record of an evaluation. Did you mean 'acuracy'?"
    )
