"""Parity with one process over sharding x replicas x accumulation x checkpointing x offload x precision x ties x
uneven tensors x dropout x document isolation, causal and masked.

By default a pairwise cover; `-m slow` runs the cross product. SHARDWISE_TEST_SEED draws another cover.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from shardwise.config import Job
from shardwise.testing.comparison import Report
from shardwise.testing.world import WorldPool
from tests.parity.jobs import verify_one
from tests.parity.matrix import DIMENSIONS, Case, job_of, pairwise, whole, world_size

SEED = int(os.environ.get("SHARDWISE_TEST_SEED", "0"))
COVER = pairwise(SEED)
BATCH = 8  # cases of one world size in one call of the pool


def verify_many(jobs: list[Job]) -> list[Report | None]:
    """Run on every rank of a world; two steps tell what three do."""
    return [verify_one(job, steps=2) for job in jobs]


def batches(cases: list[Case]) -> list[tuple[int, list[Case]]]:
    """Cases of one world size, a few at a time."""
    by_size: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_size[world_size(case)].append(case)
    return [
        (size, group[start : start + BATCH])
        for size, group in sorted(by_size.items())
        for start in range(0, len(group), BATCH)
    ]


def check(world_pool: WorldPool, corpora: Path, size: int, cases: list[Case]) -> None:
    print(f"seed {SEED}, world of {size}")
    reports = world_pool.run(size, verify_many, [job_of(case, corpora) for case in cases], timeout=280)[0]
    failures = [
        f"{case}\n  first {report.first}\n  {report.diagnosis}"
        for case, report in zip(cases, reports, strict=True)
        if not report.agrees
    ]
    assert not failures, "\n".join([f"seed {SEED}", *failures])


@pytest.mark.parametrize("size, cases", batches(COVER), ids=lambda value: str(value) if isinstance(value, int) else "")
def test_pairwise(world_pool: WorldPool, corpora: Path, size: int, cases: list[Case]) -> None:
    check(world_pool, corpora, size, cases)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_everything(world_pool: WorldPool, corpora: Path) -> None:
    for size, cases in batches(list(whole())):
        check(world_pool, corpora, size, cases)


def test_cover_holds_every_value_and_many_pairs() -> None:
    for name, values in DIMENSIONS.items():
        assert {repr(case[name]) for case in COVER} == {repr(value) for value in values}
    assert len(COVER) < 100
