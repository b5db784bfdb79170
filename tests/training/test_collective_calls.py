"""A script that catches what a step of a session has raised: all ranks hear of it, and none trains on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import ConfigError, ShardwiseError, UserCodeError, WorkerError
from shardwise.launch import peer_failure
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from tests.habits.building import POSITIONS, WIDTH, Stack

STEPS, FAILING, ROWS = 4, 2, 2
PARALLEL: dict[str, dict[str, Any]] = {
    "stages": {"pipeline_parallel_degree": 2},
    "shard": {"sharded_data_parallel_degree": 2},
    "replica": {},
    "zero1": {"shard_optimizer_state": True},
}


def came_to(layout: str, kind: str, failing: int) -> list[str]:
    """Return what each step comes to on this rank; in one of them the rank `failing` fails alone.

    In the step before, all ranks refuse their microbatches.
    """
    peer_failure.WAIT_SECONDS = 1.0
    parallel = {"device": "cpu", **PARALLEL[layout]}
    model = {"loss": "tests.habits.building:squared_error"}
    example = {"x": torch.zeros(ROWS, POSITIONS, WIDTH)}
    came: list[str] = []
    try:
        with Session({"model": model, "parallel": parallel}, model=Stack, example=example) as session:
            for step in range(STEPS):
                fails = step == FAILING and dist.get_rank() == failing
                came.append(step_came_to(session, microbatches(session, step, kind if fails else "")))
    except WorkerError as error:
        came.append(f"at the end: {error}")
    return came


def step_came_to(session: Session, batches: list[dict[str, torch.Tensor]]) -> str:
    try:
        return f"{session.step(batches).loss:.9f}"
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"


def microbatches(session: Session, step: int, kind: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, POSITIONS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)
    if step == FAILING - 1 or kind == "no microbatch":
        return []
    if kind == "a forward":
        session.model.module.blocks[-1].register_forward_pre_hook(refuse_values)
    return [{"x": x, "labels": y}] * 2


def refuse_values(module: nn.Module, args: Any) -> None:
    raise ValueError("a value is no number")


def check(pool: WorldPool, layout: str, kind: str, failing: int) -> None:
    ranks = pool.run(2, came_to, layout, kind, failing)
    own, other = ranks[failing], ranks[1 - failing]
    assert own[0] == other[0] and own[1] == other[1] and "got no microbatch" in own[1]
    cause = "raised ValueError: a value is no number"
    assert cause in own[FAILING] and f"rank {failing}: " in other[FAILING] and cause in other[FAILING]
    assert other[FAILING].partition(":")[0] == own[FAILING].partition(":")[0]
    assert len(own) == len(other) == STEPS
    for last in (own[-1], other[-1]):
        assert last.startswith("WorkerError") and f"rank {failing}" in last and cause in last


def test_ranks_hear_of_an_error_that_another_has_caught(world_pool: WorldPool) -> None:
    check(world_pool, "stages", "a forward", 1)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("layout", PARALLEL)
def test_on_every_layout(world_pool: WorldPool, layout: str, failing: int) -> None:
    check(world_pool, layout, "a forward", failing)


@pytest.mark.slow
def test_of_an_argument_that_one_rank_alone_has_got(world_pool: WorldPool) -> None:
    ranks = world_pool.run(2, came_to, "shard", "no microbatch", 0)
    assert ranks[0][FAILING].startswith("ConfigError: step() got no microbatch")
    assert ranks[0][-1].startswith("at the end: rank 0 had failed, and others had gone on: ConfigError: step() got")
    assert ranks[1][FAILING].startswith("ConfigError: rank 0: step() got no microbatch") and len(ranks[1]) == STEPS


def test_nothing_is_trained_on_half_a_step() -> None:
    example = {"x": torch.zeros(ROWS, POSITIONS, WIDTH)}
    job = {"model": {"loss": "tests.habits.building:squared_error"}, "parallel": {"device": "cpu"}}
    with Session(job, model=Stack, example=example) as session:
        with pytest.raises(ConfigError):
            session.step([])
        good, bad = microbatches(session, 0, ""), microbatches(session, 0, "a forward")
        with pytest.raises(UserCodeError):
            session.step([*good, *bad])
        with pytest.raises(WorkerError, match=r"failed before: UserCodeError: .*no number.*open another session"):
            session.step(good)
        with pytest.raises(WorkerError):
            session.evaluate([good])
