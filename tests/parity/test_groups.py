"""A process may leave its group and join another: nothing of the first one is used in the second."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from tests.parity.jobs import make_job, verify_one


def verify_times(job: Job, times: int) -> list[bool]:
    reports = [verify_one(job, steps=1) for _ in range(times)]
    return [report is None or report.agrees for report in reports]


@pytest.mark.slow
def test_a_second_group_that_looks_like_the_first(world_pool: WorldPool, corpora: Path) -> None:
    """The first run makes more groups, so that the second's lack the names that a stale mesh would look up."""
    job = make_job(corpora, layers=1, parallel={"sharded_data_parallel_degree": 2})
    assert all(map(all, world_pool.run(4, verify_times, job, 3)))
    assert all(map(all, world_pool.run(4, verify_times, job, 1)))
