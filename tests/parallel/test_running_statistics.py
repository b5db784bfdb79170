"""Running statistics: of the first rank, or the mean of all, equal on every rank and as in plain torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.job.schema import Job
from shardwise.parallel.running_statistics import RunningStatistics
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
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


@pytest.mark.sampled(1)
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


def settle_on_stages(is_changed: bool) -> str:
    """Settle a buffer that two of three stages hold; return why it is refused."""
    rank = dist.get_rank()
    norms = [nn.BatchNorm1d(2)] if rank < 2 else [nn.Identity()]
    layout: Any = SimpleNamespace(size=lambda axis: 3, index=lambda axis: rank)
    statistics = RunningStatistics(norms, ["running_mean"], layout, synchronised=False)
    statistics.begin()
    if is_changed and rank < 2:
        norms[0](torch.ones(3, 2))
    try:
        statistics.settle(torch.device("cpu"))
    except ModelError as error:
        return str(error)
    return ""


def test_a_buffer_of_some_stages_is_refused_only_where_a_forward_changes_it(world_pool: WorldPool) -> None:
    assert world_pool.run(3, settle_on_stages, False) == ["", "", ""]
    assert all("hold the buffer running_mean" in reason for reason in world_pool.run(3, settle_on_stages, True))


def train_on(job: Job, saved_after: int = 0) -> tuple[int, dict[str, Tensor]]:
    """Train `job` from where it stands, and return its steps and its model after them.

    Args:
        saved_after: end with a checkpoint after so many steps; 0: go on to the last.
    """
    with Session(job, device=torch.device("cpu")) as session:
        first = session.restore()
        for batches in session.batches():
            session.step(batches)
            if session.steps_done == saved_after:
                session.save(wait=True)
                break
        module = session.model.module
        values = dict(session.model.whole_tensors()) | dict(module.named_buffers())
        return first, {name: value.detach().clone() for name, value in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["first_rank", "synchronised"])
def test_a_resumed_run_has_the_statistics_of_an_undisturbed_one(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, rule: str
) -> None:
    sections = {"model": {"running_statistics": rule}, "checkpoint": {"resume": "auto"}}
    job = make_job(str(corpora), "BatchNormed", sections).model_copy(update={"output": str(tmp_path / "whole")})
    other = job.model_copy(update={"output": str(tmp_path / "cut")})
    undisturbed = world_pool.run(2, train_on, job)
    world_pool.run(2, train_on, other, 1)
    resumed = world_pool.run(2, train_on, other)
    for (first, values), (again, expected) in zip(resumed, undisturbed, strict=True):
        assert (first, again) == (1, 0)
        assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= values.keys()
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in values)
