"""Modules of a script's own, with each habit of building, under version 2: right, or refused by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import shardwise.smp.v2 as tsm
from shardwise.errors import ShardwiseError
from shardwise.testing.world import WorldPool
from tests.habits.table import HABITS, Habit
from tests.smp.habits import (
    STEPS,
    assert_equal_parameters,
    make_batch,
    make_module,
    run_rows,
    train_plainly,
    train_with_statistics,
)

RANKS = 2
DEGREES = {"FSDP alone": 0, "replicas": 1, "shards": 2}
DTYPE = "and FSDP flattens real floating-point parameters alone"
HOOK = "has a hook on its gradient"
READS = r"reads blocks.0.\S+ while blocks.0 does not run"
REFUSED = {
    "ScalingHooks": rf"first.weight of ScalingHooks \(.*modules.py:\d+\) {HOOK}",
    "ClippingHook": rf"last.weight of ClippingHook \(.*modules.py:\d+\) {HOOK}",
    "AccumulateHook": rf"last.weight of AccumulateHook \(.*modules.py:\d+\) {HOOK}",
    "Penalized": rf"Penalized \(.*modules.py:\d+\) {READS}",
    "ReturnedParameters": rf"ReturnedParameters \(.*modules.py:\d+\) {READS}",
    "GrowingState": r"blocks.0 of GrowingState \(.*modules.py:\d+\) returns no tensor",
    "Scalars": r"temperature of Scalars \(.*modules.py:\d+\) has 0 dims",
    "OddParameters": rf"blocks.0.order of OddParameters \(.*modules.py:\d+\) is int64, {DTYPE}",
    "ComplexParameters": rf"blocks.0.own of ComplexParameters \(.*modules.py:\d+\) is complex64, {DTYPE}",
    "TiedBlocks": r"blocks.0.up.weight of TiedBlocks \(.*modules.py:\d+\) is blocks.2.up.weight too",
    "BoundedRows": r"words of BoundedRows \(.*modules.py:\d+\) has max_norm",
    "MovingAverages": r"forward of MovingAverages \(.*modules.py:\d+\) writes the parameter blocks.0.slow",
    "ReplacedParameters": r"ReplacedParameters \(.*modules.py:\d+\) puts a new one in place of the parameter last",
    "SparseGradients": r"words of SparseGradients \(.*modules.py:\d+\) has sparse gradients",
    "ParameterAttributes": r"ParameterAttributes \(.*modules.py:\d+\) reads an attribute that is set on a parameter",
    "CountedHook": rf"last.weight of CountedHook \(.*keeping.py:\d+\) {HOOK}",
    "LateHook": r"LateHook \(.*keeping.py:\d+\) puts a hook on the gradient of last.weight",
    "LateWrites": r"LateWrites \(.*keeping.py:\d+\) writes the parameter blocks.\d.up.weight by `.data`",
    "LateParameter": r"LateParameter \(.*keeping.py:\d+\) puts a new one in place of the parameter gain",
    "Unfreezing": rf"Unfreezing \(.*keeping.py:\d+\) {READS}",
    "StateReading": r"StateReading \(.*keeping.py:\d+\) reads blocks.1.up.weight while blocks.1 does not run",
    "ClosedOver": r"project of ClosedOver \(.*keeping.py:\d+\) keeps parameters",
    "FrozenForAWhile": r"the forward of FrozenForAWhile \(.*modules.py:\d+\) freezes or unfreezes parameters",
    "ListedParameters": r"weights of ListedParameters \(.*modules.py:\d+\) keeps parameters",
}
QUICK = ("Penalized", "TiedBlocks", "ParameterAttributes")


def _trained(name: str, degree: int) -> tuple[str, dict[str, Tensor]]:
    """Return what has refused the module, or its weights after some steps."""
    tsm.init({"hybrid_shard_degree": degree})
    try:
        module = make_module(name)
        blocks = {type(block) for block in getattr(module, "blocks", ())}
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks)
        model: Any = FullyShardedDataParallel(module, auto_wrap_policy=policy, use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            x, label = (value.chunk(RANKS)[dist.get_rank()] for value in make_batch(step))
            optimizer.zero_grad()
            run_rows(name, model, x, label).backward()
            optimizer.step()
        settings = FullStateDictConfig(offload_to_cpu=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, settings):
            return "", {name: value.clone() for name, value in model.state_dict().items()}
    except ShardwiseError as error:
        return str(error), {}
    finally:
        tsm.state.reset()


def _check(pool: WorldPool, habit: Habit, layout: str) -> None:
    for refusal, weights in pool.run(RANKS, _trained, habit.module, DEGREES[layout]):
        if habit.module in REFUSED:
            assert re.search(REFUSED[habit.module], refusal), refusal
            continue
        assert not refusal
        if habit.module == "ReadStatistics":  # FSDP leaves each rank its own
            assert_equal_parameters(weights, train_with_statistics(habit.module, RANKS, shared=False))
        elif habit.module != "CollectiveForward":  # one process would not take the mean of all ranks
            assert_equal_parameters(weights, train_plainly(habit.module, RANKS))


def cases(quick: bool) -> Iterator[tuple[Habit, str]]:
    for habit in HABITS:
        for layout in DEGREES:
            if (habit.module in QUICK and layout == "shards") == quick:
                yield habit, layout


@pytest.mark.parametrize(("habit", "layout"), cases(quick=True), ids=str)
def test_a_habit_under_fsdp_is_right_or_refused(world_pool: WorldPool, habit: Habit, layout: str) -> None:
    _check(world_pool, habit, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("habit", "layout"), cases(quick=False), ids=str)
def test_a_habit_under_fsdp_on_every_layout(world_pool: WorldPool, habit: Habit, layout: str) -> None:
    _check(world_pool, habit, layout)
