"""The drawn schedule idles as much as the formula says, and does each forward and backward once, in order."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardwise.planner.timeline import timeline


@pytest.mark.parametrize("ranks, virtual, count", [(2, 1, 2), (4, 1, 8), (4, 2, 8), (3, 3, 6), (8, 1, 3)])
@pytest.mark.parametrize("simple", [False, True])
def test_the_bubble_is_that_of_the_formula(ranks: int, virtual: int, count: int, simple: bool) -> None:
    if simple and virtual > 1:
        pytest.skip("fill-drain has one stage a rank")
    blocks = timeline(ranks, virtual, count, 1.0, 2.0, simple)
    end = max(block.start + block.seconds for block in blocks)
    assert end == pytest.approx(3.0 * (virtual * count + ranks - 1))
    assert len({(block.stage, block.microbatch, block.backward) for block in blocks}) == len(blocks)
    assert len(blocks) == 2 * ranks * virtual * count


def test_no_rank_does_two_things_at_once_and_nothing_comes_before_what_it_needs() -> None:
    blocks = timeline(4, 2, 8, 1.0, 2.0)
    done = {(block.stage, block.microbatch, block.backward): block.start + block.seconds for block in blocks}
    for block in blocks:
        if not block.backward and block.stage:
            assert block.start >= done[block.stage - 1, block.microbatch, False]
        if block.backward:
            assert block.start >= done[block.stage, block.microbatch, False]
    for rank in range(4):
        own = sorted((block for block in blocks if block.rank == rank), key=lambda block: block.start)
        assert all(one.start + one.seconds <= two.start + 1e-9 for one, two in pairwise(own))
