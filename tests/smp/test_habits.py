"""Modules of a script's own, with each habit of building: right on every layout of version 1, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise.smp as smp
from shardwise.errors import ShardwiseError
from shardwise.testing.world import WorldPool
from tests.habits.table import HABITS, ONE, REPLICAS, SHARDS, STAGES, ZERO_1, Habit
from tests.smp.habits import (
    STEPS,
    assert_equal_parameters,
    make_batch,
    make_module,
    run_rows,
    train_plainly,
    train_with_statistics,
)

ONCE: dict[str, Any] = {"ddp": True, "microbatches": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    ONE: (1, ONCE),
    REPLICAS: (2, ONCE),
    ZERO_1: (2, ONCE | {"shard_optimizer_state": True}),
    SHARDS: (2, ONCE | {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}),
    STAGES: (2, {"ddp": True, "microbatches": 2, "pipeline_parallel_degree": 2}),
}
MEETING = ("CollectiveForward", "ImportedCollectives")
STATISTICS = "ReadStatistics"
# Unlike jobs, scripts bring their optimizer, and their ranks may meet where all of them run the same modules. They say
# how many microbatches there are, and their ranks read the first rank's statistics, as under DDP.
RIGHT_IN_SCRIPTS = {
    ("SparseGradients", ONE), ("SparseGradients", STAGES), ("ClippingHook", ONE),
    ("CountedHook", ONE), ("LateHook", ONE),
    *((name, layout) for name in MEETING for layout in (REPLICAS, ZERO_1, SHARDS)),
    *((name, layout) for name in ("DerivedAttribute", "SharedMemory", "RowsTogether") for layout in LAYOUTS),
    *((STATISTICS, layout) for layout in (REPLICAS, ZERO_1, SHARDS)),
}  # fmt: skip
QUICK = {"OddParameters": SHARDS, "SparseGradients": ZERO_1, "ListedParameters": ONE}


@smp.step
def train_step(model: Any, name: str, x: Tensor, label: Tensor) -> Tensor:
    loss = run_rows(name, model, x, label)
    model.backward(loss)
    return loss


def _trained(name: str, config: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Return what has refused the module, or its weights after some steps."""
    smp.init(config)
    try:
        model: Any = smp.DistributedModel(make_module(name))
        optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(STEPS):
            x, label = (value.chunk(smp.dp_size())[smp.dp_rank()] for value in make_batch(step))
            optimizer.zero_grad()
            train_step(model, name, x, label)
            optimizer.step()
        return "", model.state_dict()
    except ShardwiseError as error:
        return str(error), {}
    finally:
        smp.state.reset()


def _check(pool: WorldPool, habit: Habit, layout: str) -> None:
    ranks, config = LAYOUTS[layout]
    refused = habit.refused.get(layout) if (habit.module, layout) not in RIGHT_IN_SCRIPTS else None
    for refusal, weights in pool.run(ranks, _trained, habit.module, config):
        if refused is not None:
            assert re.search(refused, refusal), refusal
            continue
        assert not refusal
        if habit.module in MEETING and ranks > 1:
            continue  # one process would not take the mean of all ranks
        if (habit.module, layout) in RIGHT_IN_SCRIPTS and habit.module == STATISTICS:
            assert_equal_parameters(weights, train_with_statistics(habit.module, ranks, shared=True))
            continue
        parts = config["microbatches"] * (1 if layout == STAGES else ranks)
        assert_equal_parameters(weights, train_plainly(habit.module, parts))


def cases(quick: bool) -> Iterator[tuple[Habit, str]]:
    for habit in HABITS:
        for layout in LAYOUTS:
            if (QUICK.get(habit.module) == layout) == quick and layout not in habit.untried:
                yield habit, layout


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("habit", "layout"), cases(quick=True), ids=str)
def test_a_habit_in_a_script_is_right_or_refused(world_pool: WorldPool, habit: Habit, layout: str) -> None:
    _check(world_pool, habit, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("habit", "layout"), cases(quick=False), ids=str)
def test_a_habit_in_a_script_on_every_layout(world_pool: WorldPool, habit: Habit, layout: str) -> None:
    _check(world_pool, habit, layout)
