"""Parity with one process over sharding x replicas x accumulation x checkpointing x offload x precision x ties x
uneven tensors x dropout x document isolation, causal and masked.

By default every pair of values occurs in some case; with `-m slow` every triple, of more values. (The cross product
has more than 100,000 cases.) SHARDWISE_TEST_SEED draws another cover.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from pathlib import Path

import pytest

from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.world import WorldPool
from tests.parity.jobs import facts_of, verify_one
from tests.parity.matrix import ALL, DIMENSIONS, Case, cover, job_of, world_size

SEED = int(os.environ.get("SHARDWISE_TEST_SEED", "0"))
COVER = cover(SEED, 2, DIMENSIONS)
BATCH = 8  # cases of one world size in one call of the pool


def verify_many(jobs: list[tuple[Job, ModelFacts]]) -> list[VerifyReport | None]:
    """Run on every rank of a world; two steps tell what three do."""
    return [verify_one(job, 2, facts) for job, facts in jobs]


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
    jobs = [job_of(case, corpora) for case in cases]
    reports = world_pool.run(size, verify_many, [(job, facts_of(job)) for job in jobs], timeout=280)[0]
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
def test_every_triple(world_pool: WorldPool, corpora: Path) -> None:
    for size, cases in batches(cover(SEED, 3, ALL)):
        check(world_pool, corpora, size, cases)


def test_cover_holds_every_pair() -> None:
    for a, b in itertools.combinations(DIMENSIONS, 2):
        held = {(repr(case[a]), repr(case[b])) for case in COVER}
        illegal = {"offload", "checkpointing", "layout"} >= {a, b}  # some pairs of these are no job
        every = set(itertools.product(map(repr, DIMENSIONS[a]), map(repr, DIMENSIONS[b])))
        assert held == every or illegal, every - held
    assert len(COVER) < 80
