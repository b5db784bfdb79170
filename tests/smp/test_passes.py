"""Backward passes of a step: gradients of those that are not its last wait on their ranks, and must not stay there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise.smp as smp
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches, make_model, train_step

LEARNING_RATE = 0.1
# Batches of each optimizer step: of two passes each, but one that an epoch has ended early.
STEPS = [[0, 1], [2], [0, 1]]


def _plain(steps: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Weights after steps of plain torch, whose gradients are means over the two data ranks."""
    model = make_model("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for indices in steps:
        optimizer.zero_grad()
        for piece in (piece for index in indices for piece in batches()[index].chunk(2)):
            (model(input_ids=piece, labels=piece).loss / 2).backward()
        optimizer.step()
    return model.state_dict()


def _far(weights: dict[str, Tensor], steps: Sequence[Sequence[int]]) -> float:
    expected = _plain(steps)
    return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


def _ended_early(config: dict[str, Any], clips: bool) -> float:
    smp.init(config)
    try:
        model: Any = smp.DistributedModel(make_model("gpt2"), backward_passes_per_step=2)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
        for indices in STEPS:
            optimizer.zero_grad()
            for index in indices:
                train_step(model, batches()[index].chunk(2)[smp.dp_rank()])
            if clips:
                optimizer.clip_master_grads(1e9)
            optimizer.step()
        return _far(model.state_dict(), STEPS)
    finally:
        smp.state.reset()


@pytest.mark.parametrize("options", [{}, {"shard_optimizer_state": True}, {"tensor_parallel_degree": 2}])
def test_a_step_ahead_of_its_last_pass_has_all_ranks_gradients(world_pool: WorldPool, options: dict[str, Any]) -> None:
    config = {"ddp": True, "microbatches": 2} | options
    assert max(world_pool.run(2, _ended_early, config, "shard_optimizer_state" in options)) <= 1e-9


def _dropped(by_model: bool) -> float:
    smp.init({"ddp": True})
    try:
        model: Any = smp.DistributedModel(make_model("gpt2"), backward_passes_per_step=2)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
        rows = [batch.chunk(2)[smp.dp_rank()] for batch in batches()]
        train_step(model, rows[0])  # an epoch ends, and its last pass is dropped
        (model if by_model else optimizer).zero_grad()
        for index in (1, 2):
            train_step(model, rows[index])
        optimizer.step()
        return _far(model.state_dict(), [[1, 2]])
    finally:
        smp.state.reset()


@pytest.mark.parametrize("by_model", [False, True])
def test_a_pass_whose_gradients_are_dropped_is_not_in_the_next_step(world_pool: WorldPool, by_model: bool) -> None:
    assert max(world_pool.run(2, _dropped, by_model)) <= 1e-9
