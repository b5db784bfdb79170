"""Every planted fault of the table is noticed, most are named rightly and none wrongly; healthy jobs agree."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from shardwise.testing.comparison import VerifyReport
from shardwise.testing.faults.registry import FAULTS
from shardwise.testing.world import WorldPool
from tests.parity.jobs import verify_one
from tests.parity.planted import (
    KINDS,
    UNNAMED,
    PlantedFault,
    draw_healthy,
    planted_faults,
    planted_job,
    verify_planted,
)
from tools.planted_faults import PAGE, page_with_table

SEED = int(os.environ.get("SHARDWISE_TEST_SEED", "1"))
HEALTHY_JOBS, PARTS = 40, 4
# One of each kind; the table has the others.
QUICK = ("coarse_reduction", "unsummed_norms", "local_clip", "zero_query_key_gradients")


def judge_name(row: PlantedFault, report: VerifyReport) -> str:
    """Return whether a diagnosis is `right`, `wrong`, or `none`."""
    for expected in row.diagnosis.split():
        name, _, place = expected.partition(":")
        if report.fault == name and place in report.diagnosis:
            return "right"
    return "none" if report.fault in UNNAMED else "wrong"


def plant(pool: WorldPool, corpora: Path, row: PlantedFault) -> VerifyReport:
    ranks, job = planted_job(corpora, row.family, row.keys)
    report: VerifyReport = pool.run(ranks, verify_planted, job, row.fault)[0]
    return report


def test_the_table_has_every_fault() -> None:
    """Those that need replicas, ties, dropout and documents at once are planted in `test_faults` alone."""
    from tests.parity.test_faults import OF_THE_JOB

    assert {row.fault for row in planted_faults()} | set(OF_THE_JOB) == set(FAULTS)
    assert sum(len(planted_faults(kind)) for kind in KINDS) == len(planted_faults())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", QUICK)
def test_a_planted_fault_is_named(world_pool: WorldPool, corpora: Path, fault: str) -> None:
    row = next(row for row in planted_faults() if row.fault == fault)
    report = plant(world_pool, corpora, row)
    assert not report.agrees and judge_name(row, report) == "right", (report.fault, report.diagnosis)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_are_noticed_and_named(world_pool: WorldPool, corpora: Path, kind: str) -> None:
    """The table says of each what the diagnosis is: its name, or where it begins. None is missed or named wrongly."""
    rows, others = planted_faults(kind), []
    for row in rows:
        report = plant(world_pool, corpora, row)
        if report.agrees or judge_name(row, report) != "right":
            others.append(f"{row.label}: {report.fault or 'agrees'}: {report.diagnosis}")
    print(f"{kind}: {len(rows) - len(others)} of {len(rows)} as the table says")
    assert rows and not others, "\n".join(others)


def test_the_page_shows_what_is_planted() -> None:
    text = PAGE.read_text()
    assert page_with_table(text) == text, "run `python -m tools.planted_faults`"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_healthy_jobs_agree(world_pool: WorldPool, corpora: Path, part: int) -> None:
    draw, alarms = random.Random(SEED + part), []
    for _ in range(HEALTHY_JOBS // PARTS):
        family, keys, ranks, job = draw_healthy(draw, corpora)
        report = world_pool.run(ranks, verify_one, job, 3)[0]
        if not report.agrees:
            alarms.append((family, keys, report.fault, report.diagnosis, report.first))
    print(f"seed {SEED + part}: {len(alarms)} of {HEALTHY_JOBS // PARTS} healthy jobs disagree")
    assert not alarms
