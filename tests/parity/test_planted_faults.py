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
from tests.parity.planted import PlantedFault, draw_healthy, planted_faults, planted_job, verify_planted

SEED = int(os.environ.get("SHARDWISE_TEST_SEED", "1"))
HEALTHY_JOBS = 40
UNNAMED = ("", "unknown_gradient", "unknown_loss")  # which say where a mistake begins, not which it is
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
    """Those of jobs with replicas and documents, of adapters and of preferences have tests of their own."""
    from tests.parity.test_faults import OF_THE_JOB

    elsewhere = {*OF_THE_JOB, "adapter_scaled_twice", "reference_not_frozen"}
    assert {row.fault for row in planted_faults()} | elsewhere == set(FAULTS)


@pytest.mark.parametrize("fault", QUICK)
def test_a_planted_fault_is_named(world_pool: WorldPool, corpora: Path, fault: str) -> None:
    row = next(row for row in planted_faults() if row.fault == fault)
    report = plant(world_pool, corpora, row)
    assert not report.agrees and judge_name(row, report) == "right", (report.fault, report.diagnosis)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_planted_faults_are_noticed_and_named(world_pool: WorldPool, corpora: Path) -> None:
    rows = planted_faults()
    missed, verdicts = [], []
    for row in rows:
        report = plant(world_pool, corpora, row)
        if report.agrees:
            missed.append(row.label)
        verdict = judge_name(row, report)
        verdicts.append(verdict)
        if verdict != "right":
            print(f"{verdict}: {row.label}: {report.fault}: {report.diagnosis}")
    right, wrong = verdicts.count("right"), verdicts.count("wrong")
    print(f"{len(rows) - len(missed)} of {len(rows)} noticed, {right} named rightly, {wrong} wrongly; missed {missed}")
    assert len(missed) <= 0.05 * len(rows)
    assert right >= 2 / 3 * len(rows) and wrong == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_healthy_jobs_agree(world_pool: WorldPool, corpora: Path) -> None:
    draw, alarms = random.Random(SEED), []
    for _ in range(HEALTHY_JOBS):
        family, keys, ranks, job = draw_healthy(draw, corpora)
        report = world_pool.run(ranks, verify_one, job, 3)[0]
        if not report.agrees:
            alarms.append((family, keys, report.fault, report.diagnosis, report.first))
    print(f"seed {SEED}: {HEALTHY_JOBS - len(alarms)} of {HEALTHY_JOBS} healthy jobs agree")
    assert not alarms
