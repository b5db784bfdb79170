"""Drawn programs of collectives give what a plain computation gives: a few by default, ten thousand as slow tests."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwise.testing.world import WorldPool
from tests.collectives.programs import CHUNK, ENDS, RANKS, run_programs

MANY, PART = 10_000, 500


def test_a_few_programs(world_pool: WorldPool) -> None:
    assert sum(world_pool.run(RANKS, run_programs, 0, 12)[0].values()) == 12


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, MANY, PART))
def test_many_programs(world_pool: WorldPool, first: int) -> None:
    ends: Counter[str] = Counter()
    for begin in range(first, first + PART, CHUNK):
        ends.update(world_pool.run(RANKS, run_programs, begin, begin + CHUNK, timeout=600)[0])
    assert sum(ends.values()) == PART
    assert set(ends) == set(ENDS)
