"""Stages of modules whose forwards skip blocks: right, or refused with the blocks that were skipped."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import ModelError, UserCodeError
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.traced_cut import cut_by_trace
from shardwise.parallel.stage_boundary import StageBoundary
from shardwise.parallel.transforms.stages import cut_stage
from shardwise.plan.plan import World, resolve
from tests.habits import keeping
from tests.habits.building import POSITIONS, WIDTH, Stack

EXAMPLE = {"x": torch.empty(2, POSITIONS, WIDTH, device="meta")}


class ScheduledDepth(Stack):
    """Runs the blocks that `chosen` names."""

    chosen: tuple[int, ...] = (0, 1, 2)

    def run_blocks(self, x: Tensor) -> Tensor:
        for number in self.chosen:
            x = self.blocks[number](x)
        return x


class ReadingLate(ScheduledDepth):
    """Reads a weight of a block once `reads` is set."""

    reads = False

    def run_blocks(self, x: Tensor) -> Tensor:
        scale = self.blocks[2].up.weight.mean() if self.reads else 1.0
        return super().run_blocks(x * scale)


class DroppedAtRandom(Stack):
    """Each process has its own random numbers."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 2.0:
                x = block(x)
        return x


class Scaled(DroppedAtRandom):
    """The same in a forward that only a trace could cut."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * random.random()
        return x


class Coded(Stack):
    """Blocks up to a code, to which no gradient comes, and blocks behind it."""

    def run_blocks(self, x: Tensor) -> Tensor:
        codes = self.blocks[1](self.blocks[0](x)).argmax(-1, keepdim=True)
        return self.blocks[2](self.blocks[2](x * codes.to(x.dtype)))  # twice: only a trace can cut this


def _facts(module: Stack, job: Job) -> ModelFacts:
    return cut_by_trace(module, discover(module, job, EXAMPLE), 8, EXAMPLE)


def _job() -> Job:
    return Job.model_validate(
        {
            "model": {"factory": "tests.habits.building:Stack", "loss": "tests.habits.building:squared_error"},
            "data": {"factory": "tests.habits.building:Rows"},
            "parallel": {"workers": 2, "pipeline_parallel_degree": 2, "device": "cpu"},
            "training": {"sequences_per_step": 8, "microbatch_size": 2},
        }
    )


def _stage(number: int, kind: type[ScheduledDepth] = ScheduledDepth) -> tuple[Any, StageBoundary]:
    with torch.device("meta"):
        module = kind()
    facts = _facts(module, _job())
    plan = resolve(_job(), World(2, "cpu", 2), facts)
    boundary = cut_stage(module, facts, plan, number, torch.device("cpu"))
    module.to_empty(device="cpu")
    boundary.input = torch.ones(2, POSITIONS, WIDTH) if number else None
    return module, boundary


@pytest.mark.parametrize(
    ("stage", "chosen", "skipped"), [(0, (0, 1), "blocks.2 to blocks.2"), (1, (2,), "blocks.0 to blocks.1")]
)
def test_a_stage_whose_neighbours_are_skipped_is_refused(stage: int, chosen: tuple[int, ...], skipped: str) -> None:
    module, _ = _stage(stage)
    module.chosen = chosen
    with pytest.raises(ModelError, match=f"ScheduledDepth .* has skipped all blocks of other stages, {skipped}"):
        module(x=torch.ones(2, POSITIONS, WIDTH))


def test_a_forward_that_reads_a_block_of_another_stage_later_is_told_so() -> None:
    module, _ = _stage(0, ReadingLate)
    module.reads = True
    with pytest.raises(UserCodeError, match=r"'up' \(.*test_stages.py:\d+\)\. .* if this line reads what another"):
        module(x=torch.ones(2, POSITIONS, WIDTH))


@pytest.mark.parametrize(("stage", "chosen"), [(0, (1, 2)), (1, (0, 2))])
def test_a_block_that_all_stages_skip_is_skipped(stage: int, chosen: tuple[int, ...]) -> None:
    module, _ = _stage(stage)
    module.chosen = chosen
    module(x=torch.ones(2, POSITIONS, WIDTH))


def test_a_forward_with_random_numbers_of_the_process_is_not_cut() -> None:
    with torch.device("meta"):
        answer = discover(DroppedAtRandom(), _job(), EXAMPLE).supports(Axis.PIPELINE)
    assert not answer.ok and "draws numbers from Python's or NumPy's generator" in answer.reason


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (keeping.FlagsBetweenBlocks, "its blocks return values that are no tensors"),
        (keeping.DetachedBetweenBlocks, "blocks are given what comes from first without a gradient"),
        (keeping.CountingBlocks, "blocks.0 changes the number depth of CountedResidual"),
        (keeping.NumbersOnBlocks, "blocks.0 changes the number blocks.0.scale of NumbersOnBlocks"),
        (keeping.ReachedParents, r"ReachedParents \(.*keeping.py:\d+\) reads first.weight"),
        (keeping.LateWrites, ""),  # its blocks count their own calls, which nothing else reads
    ],
)
def test_what_stages_of_other_blocks_would_not_see_is_an_obstacle(module: type[Stack], reason: str) -> None:
    with torch.device("meta"):
        answer = discover(module(), _job(), EXAMPLE).supports(Axis.PIPELINE)
    assert answer.ok == (not reason)
    assert re.search(reason, answer.reason)


@pytest.mark.slow
def test_nor_is_it_traced() -> None:
    with torch.device("meta"):
        answer = _facts(Scaled(), _job()).supports(Axis.PIPELINE)
    assert not answer.ok and "its trace cannot be cut either" in answer.reason


def test_weights_without_a_gradient_ahead_of_a_cut_of_the_trace_are_refused() -> None:
    with torch.device("meta"):
        facts = _facts(Coded(), _job())
    reason = facts.supports(Axis.PIPELINE).reason
    assert "no gradient comes to blocks.0." in reason and "one of zeros" in reason
