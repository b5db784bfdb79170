"""Cuts a chain of blocks into pipeline stages so that the costliest rank costs least.

The cost of a block is SMP's: a weighted sum of its share of the memory and of the compute. What stands before the
blocks and after them belongs to the first and the last stage and counts there. A rank computes and holds all of its
stages, so that their sum is balanced first, and the largest stage, for which the others wait, second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, combinations_with_replacement, product
from typing import Any

import numpy as np

from shardwise.model.facts import ModelFacts

Array = np.ndarray[Any, Any]
ROUND = 12  # decimals of a cost; what differs by less is alike
FEW = 8  # stages up to which pairs of moves are tried: their number grows with the fourth power


def block_costs(facts: ModelFacts, sequence_length: int, memory_weight: float) -> tuple[list[float], float, float]:
    """Return the costs of the blocks, of what stands before them, and of what stands after; all together 1.

    Memory is counted in parameters, compute in model FLOPs of a token: 2·P of a block and 4·s·h of its attention (PaLM,
    arXiv 2204.02311, appendix B), 2·P of the head, nothing of tables that are only looked up.
    """
    attention = 2.0 * facts.attended(sequence_length) * facts.attention_width
    before, after = sum(facts.stages.before.values()), sum(facts.stages.after.values())
    sizes = [block.parameters + facts.stages.between.get(number, 0) for number, block in enumerate(facts.blocks)]
    memory = [*map(float, sizes), float(before), float(after)]
    compute = [*(size + attention for size in sizes), 0.0, float(after)]
    whole_memory, whole_compute = max(1.0, sum(memory)), max(1.0, sum(compute))
    *blocks, first, last = (
        memory_weight * m / whole_memory + (1 - memory_weight) * c / whole_compute
        for m, c in zip(memory, compute, strict=True)
    )
    return blocks, first, last


def balance(costs: Sequence[float], ranks: Sequence[int], first: float = 0.0, last: float = 0.0) -> list[int]:
    """Return the number of blocks in each stage, at least one, such that the costliest rank costs least.

    Empty where there are fewer blocks than stages.

    Exact with one stage on a rank, by dynamic programming over (blocks placed, stages used); of equal cuts the one with
    the longest last stage. With several the cut of equal stages is improved by moving blocks from stage to stage.

    Args:
        costs: of the blocks.
        ranks: of each stage the rank that holds it.
        first, last: what the first and the last stage cost besides.
    """
    return list(_balance(tuple(costs), tuple(ranks), first, last))


@lru_cache(maxsize=256)  # a search asks for the same few cuts thousands of times
def _balance(costs: tuple[float, ...], ranks: tuple[int, ...], first: float, last: float) -> tuple[int, ...]:
    if len(costs) < len(ranks):
        return ()
    until = (0.0, *accumulate(costs))
    extra = [0.0] * len(ranks)
    extra[0] += first
    extra[-1] += last
    sizes = _even_stages(until, extra)
    return _even_ranks(sizes, until, ranks, extra) if len(set(ranks)) < len(ranks) else sizes


def _even_stages(until: Sequence[float], extra: Sequence[float]) -> tuple[int, ...]:
    count, stages = len(until) - 1, len(extra)
    best = [float("inf")] * (count + 1)  # largest stage, with this many blocks placed
    best[0] = 0.0
    cuts: list[list[int]] = []
    for stage in range(stages):
        row, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            for start in range(stage, end):
                largest = max(best[start], until[end] - until[start] + extra[stage])
                if largest < row[end]:
                    row[end], cut[end] = largest, start
        best = row
        cuts.append(cut)

    sizes, end = [], count
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return tuple(reversed(sizes))


def _even_ranks(
    sizes: tuple[int, ...], until: Sequence[float], ranks: Sequence[int], extra: Sequence[float]
) -> tuple[int, ...]:
    """Return `sizes` with blocks moved between stages, one at a time or two, as long as that helps."""
    cut, together = np.array(sizes), 1
    best = _costs(cut[None], until, ranks, extra)[0]
    while together <= (2 if len(sizes) <= FEW else 1):
        moved = cut + _moves(len(sizes), together)
        moved = moved[moved.min(axis=1) > 0]
        costs = _costs(moved, until, ranks, extra)
        # The least first number, among equals the least second, and so on; then the cut itself, so that one is chosen.
        order = np.lexsort(np.hstack([costs, moved]).T[::-1])
        if len(order) and tuple(costs[order[0]]) < tuple(best):
            best, cut, together = costs[order[0]], moved[order[0]], 1
        else:
            together += 1
    return tuple(map(int, cut))


def _costs(cuts: Array, until: Sequence[float], ranks: Sequence[int], extra: Sequence[float]) -> Array:
    """Return what is made small, for each of `cuts` [cuts, stages].

    That is the largest load of a rank, the largest stage, and the loads of all ranks, the largest first.
    """
    ends = np.pad(np.cumsum(cuts, axis=1), ((0, 0), (1, 0)))
    stages = np.diff(np.array(until)[ends]) + np.array(extra)
    loads = np.sort(stages @ (np.array(ranks)[:, None] == np.unique(ranks)))[:, ::-1]
    return np.column_stack([loads[:, 0], stages.max(axis=1), loads]).round(ROUND)


@lru_cache(maxsize=16)
def _moves(stages: int, together: int) -> Array:
    """Return [moves, stages]: fewer by a block in as many stages as are moved `together`, and more by one in others."""
    places = list(combinations_with_replacement(range(stages), together))
    pairs = [(less, more) for less, more in product(places, places) if not set(less) & set(more)]
    change = np.zeros((len(pairs), stages), dtype=np.int8)
    for row, (less, more) in zip(change, pairs):
        np.add.at(row, [*less], -1)
        np.add.at(row, [*more], 1)
    return change
