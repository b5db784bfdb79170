"""Where to cut a chain of blocks into pipeline stages so that the costliest stage costs least.

The cost of a block is SMP's: a weighted sum of its share of the memory and of the compute. What stands before the
blocks and after them belongs to the first and the last stage and counts there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from shardwise.families.facts import ModelFacts


def block_costs(facts: ModelFacts, sequence_length: int, memory_weight: float) -> tuple[list[float], float, float]:
    """Costs of the blocks, of what stands before them, and of what stands after; all together 1.

    Memory is counted in parameters, compute in model FLOPs of a token: 2·P of a block and 4·s·h of its attention (PaLM,
    arXiv 2204.02311, appendix B), 2·P of the head, nothing of tables that are only looked up.
    """
    attention = 2.0 * sequence_length * facts.hidden_size
    before, after = sum(facts.stages.before.values()), sum(facts.stages.after.values())
    memory = [*(float(block.parameters) for block in facts.blocks), float(before), float(after)]
    compute = [*(block.parameters + attention for block in facts.blocks), 0.0, float(after)]
    whole_memory, whole_compute = max(1.0, sum(memory)), max(1.0, sum(compute))
    *blocks, first, last = (
        memory_weight * m / whole_memory + (1 - memory_weight) * c / whole_compute
        for m, c in zip(memory, compute, strict=True)
    )
    return blocks, first, last


def balance(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Number of blocks in each stage, at least one, such that the largest stage is smallest; empty if there are fewer.

    Exact, by dynamic programming over (blocks placed, stages used); of equal cuts the one with the longest last stage.
    """
    return list(_balance(tuple(costs), stages, first, last))


@lru_cache(maxsize=256)  # a search asks for the same few cuts thousands of times
def _balance(costs: tuple[float, ...], stages: int, first: float, last: float) -> tuple[int, ...]:
    count = len(costs)
    if count < stages:
        return ()
    until = [0.0, *accumulate(costs)]
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last

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
