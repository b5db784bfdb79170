"""Running statistics: of the first rank, or the mean of all, equal on every rank and as in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up
from shardwise.training.step import train_step
from tests.habits.building import POSITIONS
from tests.habits.trial import STEPS, gather_batches, make_job


def train(directory: str, sections: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the statistics after training, and those of torch's own batch norm on the same microbatches."""
    job = make_job(directory, "BatchNormed", sections)
    run = set_up(job, torch.device("cpu"))
    ranks = run.layout.data_ranks if job.model.running_statistics == "synchronised" else 1
    expected = nn.BatchNorm1d(POSITIONS).double()
    for step in range(STEPS):
        batches = list(run.stream.batches(step))
        train_step(run.model, run.objective, batches, run.optimizer, run.scaler, step)
        states = [after_microbatches(expected, rank) for rank in gather_batches(run, batches)[:ranks]]
        expected.load_state_dict(mean_of(states))
    statistics = {name.removeprefix("norm."): value for name, value in run.model.module.named_buffers()}
    return statistics, {name: value for name, value in expected.state_dict().items() if name in statistics}


def after_microbatches(norm: nn.BatchNorm1d, batches: list[Any]) -> dict[str, Tensor]:
    copied = nn.BatchNorm1d(POSITIONS).double()
    copied.load_state_dict(norm.state_dict())
    for batch in batches:
        copied(batch.inputs["x"].double())
    return copied.state_dict()


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return {name: v.mean(0) if v.is_floating_point() else v[0] for name, v in stacked.items()}


@pytest.mark.parametrize("rule", ["first_rank", "synchronised"])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        pytest.param({"parallel": {"pipeline_parallel_degree": 2}}, marks=pytest.mark.slow),
        pytest.param({"parallel": {"shard_optimizer_state": True}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_statistics_follow_their_rule_on_every_rank(
    world_pool: WorldPool, corpora: Path, sections: dict[str, Any], rule: str
) -> None:
    for statistics, expected in world_pool.run(
        2, train, str(corpora), {**sections, "model": {"running_statistics": rule}}
    ):
        assert statistics.keys() == expected.keys()
        for name, value in statistics.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)
