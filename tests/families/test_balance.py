"""Stages are cut where the costliest one costs least: against every other cut, and on shapes of real models."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from shardwise.config import Job
from shardwise.families.balance import balance, block_costs
from shardwise.families.build import build_model
from shardwise.families.discovery import discover


def heaviest(costs: list[float], sizes: list[int], first: float, last: float) -> float:
    bounds = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    stages = [sum(costs[start:end]) for start, end in pairwise(bounds)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


def best(costs: list[float], stages: int, first: float, last: float) -> float:
    """Of every cut there is."""
    count = len(costs)
    cuts = (
        [end - start for start, end in zip((0, *cut), (*cut, count))]
        for cut in combinations(range(1, count), stages - 1)
    )
    return min(heaviest(costs, sizes, first, last) for sizes in cuts)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.choice([1.0, draw.random(), 3.0]) for _ in range(draw.randrange(1, 11))]
    stages = draw.randrange(1, len(costs) + 1)
    first, last = draw.choice([0.0, draw.random(), 4.0]), draw.choice([0.0, draw.random(), 4.0])
    sizes = balance(costs, stages, first, last)
    assert sum(sizes) == len(costs) and len(sizes) == stages and min(sizes) >= 1
    assert heaviest(costs, sizes, first, last) == pytest.approx(best(costs, stages, first, last))


def test_fewer_blocks_than_stages_cannot_be_cut() -> None:
    assert balance([1.0, 1.0], 3) == []


SHAPES = {
    "gpt_neox": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "intermediate_size": 4096},
    "bloom": {"hidden_size": 1024, "n_head": 16, "n_layer": 24, "vocab_size": 250880},
    "llama": {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80,
              "intermediate_size": 28672, "vocab_size": 128256},
}  # fmt: skip


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("memory_weight", [0.2, 0.8])
def test_real_shapes_are_cut_as_well_as_can_be(family: str, memory_weight: float) -> None:
    """The heaviest stage is that of the best contiguous cut; of 80 blocks in 4 stages there are 79079."""
    job = Job.model_validate({"model": {"config": {"model_type": family, **SHAPES[family]}}})
    facts = discover(build_model(job), job)
    costs, first, last = block_costs(facts, 2048, memory_weight)
    assert sum(costs) + first + last == pytest.approx(1.0)
    for stages in (2, 4):
        sizes = balance(costs, stages, first, last)
        assert heaviest(costs, sizes, first, last) == pytest.approx(best(costs, stages, first, last))
    if family == "bloom":  # its head is worth several blocks
        assert sizes[-1] < sizes[1]
