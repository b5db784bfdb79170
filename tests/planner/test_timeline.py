"""The drawn schedule idles as much as the formula says, and does each forward and backward once, in order."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from shardwise.plan.draft import SPLIT_SCHEDULES, V_SCHEDULES
from shardwise.planner.formulas.timeline import timeline


@pytest.mark.parametrize("ranks, virtual, count", [(2, 1, 2), (4, 1, 8), (4, 2, 8), (3, 3, 6), (8, 1, 3)])
@pytest.mark.parametrize("schedule", ["interleaved", "simple", "zero_bubble", "zbv", "dualpipev"])
def test_the_bubble_is_that_of_the_formula(ranks: int, virtual: int, count: int, schedule: str) -> None:
    if (schedule == "simple" and virtual > 1) or (schedule == "zero_bubble" and count < ranks):
        pytest.skip("legality refuses it")
    if schedule in V_SCHEDULES and (virtual != 2 or count < 2 * ranks):
        pytest.skip("legality refuses it")
    blocks = timeline(ranks, virtual, count, 1.0, 2.0, schedule)
    end = max(block.start + block.seconds for block in blocks)
    idle = 1.0 if schedule in SPLIT_SCHEDULES else 3.0
    assert end == pytest.approx(3.0 * virtual * count + idle * (ranks - 1))
    assert len({(block.stage, block.microbatch, block.kind) for block in blocks}) == len(blocks)
    tasks = ranks * virtual * count
    done = Counter(block.kind for block in blocks)
    assert done["forward"] == tasks and done["backward"] + done["whole backward"] == tasks
    assert done["weights"] == (done["backward"] if schedule in SPLIT_SCHEDULES else 0)


def test_no_rank_does_two_things_at_once_and_nothing_comes_before_what_it_needs() -> None:
    blocks = timeline(4, 2, 8, 1.0, 2.0)
    done = {(block.stage, block.microbatch, block.kind): block.start + block.seconds for block in blocks}
    for block in blocks:
        if block.kind == "forward" and block.stage:
            assert block.start >= done[block.stage - 1, block.microbatch, "forward"]
        if block.kind == "backward":
            assert block.start >= done[block.stage, block.microbatch, "forward"]
    for rank in range(4):
        own = sorted((block for block in blocks if block.rank == rank), key=lambda block: block.start)
        assert all(one.start + one.seconds <= two.start + 1e-9 for one, two in pairwise(own))
