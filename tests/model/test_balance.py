"""Stages are cut where the costliest rank costs least: against every other cut, and on shapes of real models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest

from shardwise.job.schema import Job
from shardwise.model.balance import balance, block_costs
from shardwise.model.build import build_model
from shardwise.model.discover import discover


def heaviest(
    costs: list[float], sizes: list[int], first: float, last: float, ranks: Sequence[int] | None = None
) -> float:
    """Of the ranks that hold the stages; of the stages, where each has its own."""
    bounds = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    stages = [sum(costs[start:end]) for start, end in pairwise(bounds)]
    stages[0] += first
    stages[-1] += last
    ranks = range(len(stages)) if ranks is None else ranks
    return max(sum(cost for cost, at in zip(stages, ranks, strict=True) if at == rank) for rank in set(ranks))


def best(costs: list[float], stages: int, first: float, last: float, ranks: Sequence[int] | None = None) -> float:
    """Of every cut there is."""
    count = len(costs)
    cuts = (
        [end - start for start, end in zip((0, *cut), (*cut, count))]
        for cut in combinations(range(1, count), stages - 1)
    )
    return min(heaviest(costs, sizes, first, last, ranks) for sizes in cuts)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.choice([1.0, draw.random(), 3.0]) for _ in range(draw.randrange(1, 11))]
    stages = draw.randrange(1, len(costs) + 1)
    first, last = draw.choice([0.0, draw.random(), 4.0]), draw.choice([0.0, draw.random(), 4.0])
    sizes = balance(costs, range(stages), first, last)
    assert sum(sizes) == len(costs) and len(sizes) == stages and min(sizes) >= 1
    assert heaviest(costs, sizes, first, last) == pytest.approx(best(costs, stages, first, last))


PLACES = {"in a V": (0, 1, 1, 0), "in a long V": (0, 1, 2, 2, 1, 0), "in turns": (0, 1, 0, 1), "thrice": (0, 1) * 3}


@pytest.mark.parametrize("ranks", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("seed", range(20))
def test_ranks_with_several_stages_are_balanced_as_wholes(seed: int, ranks: tuple[int, ...]) -> None:
    """Of blocks that are alike no cut is better; of others none by more than 5 %, and the cut of even stages is not."""
    draw = random.Random(seed)
    count, alike = draw.randrange(len(ranks), 11), seed % 2 == 0
    costs = [1.0 if alike else draw.choice([1.0, draw.random(), 3.0]) for _ in range(count)]
    first, last = draw.choice([0.0, draw.random(), 4.0]), draw.choice([0.0, draw.random(), 4.0])
    sizes = balance(costs, ranks, first, last)
    assert sum(sizes) == count and len(sizes) == len(ranks) and min(sizes) >= 1
    found, least = (
        heaviest(costs, sizes, first, last, ranks),
        best(costs, len(ranks), first, last, ranks),
    )
    assert found <= least * (1 + 1e-9 if alike else 1.05)
    stage_by_stage = balance(costs, range(len(ranks)), first, last)
    assert found <= heaviest(costs, stage_by_stage, first, last, ranks) + 1e-9


def test_a_heavy_head_takes_blocks_from_its_whole_rank() -> None:
    """Stage by stage, rank 0 of the V would hold 4 blocks and the head, 8 in all."""
    ranks = (0, 1, 2, 3, 3, 2, 1, 0)
    assert heaviest([1.0] * 24, balance([1.0] * 24, ranks, 0.0, 4.0), 0.0, 4.0, ranks) == 7
    assert heaviest([1.0] * 24, balance([1.0] * 24, range(8), 0.0, 4.0), 0.0, 4.0, ranks) == 8


def test_fewer_blocks_than_stages_cannot_be_cut() -> None:
    assert balance([1.0, 1.0], range(3)) == []


SHAPES = {
    "gpt_neox": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "intermediate_size": 4096},
    "bloom": {"hidden_size": 1024, "n_head": 16, "n_layer": 24, "vocab_size": 250880},
    "llama": {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80,
              "intermediate_size": 28672, "vocab_size": 128256},
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["gpt_neox", "bloom", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory_weight", [0.2, 0.8])
def test_real_shapes_are_cut_as_well_as_can_be(family: str, memory_weight: float) -> None:
    """The heaviest stage is that of the best contiguous cut; of 80 blocks in 4 stages there are 79079."""
    job = Job.model_validate({"model": {"config": {"model_type": family, **SHAPES[family]}}})
    facts = discover(build_model(job), job)
    costs, first, last = block_costs(facts, 2048, memory_weight)
    assert sum(costs) + first + last == pytest.approx(1.0)
    for stages in (2, 4):
        sizes = balance(costs, range(stages), first, last)
        assert heaviest(costs, sizes, first, last) == pytest.approx(best(costs, stages, first, last))
    if family == "bloom":  # its head is worth several blocks
        assert sizes[-1] < sizes[1]
