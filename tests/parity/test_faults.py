"""Verify names each planted fault, and finds nothing where none is planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.job.schema import Job
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.faults import FAULTS
from shardwise.testing.world import WorldPool
from tests.parity.jobs import make_job, verify_one


def with_fault(job: Job, fault: str) -> VerifyReport | None:
    with FAULTS[fault]():
        return verify_one(job)


@pytest.fixture
def job(corpora: Path) -> Job:
    """2 replicas x 2 shards, 2 microbatches, tied weights, dropout, isolated documents, clipping that bites."""
    return make_job(
        corpora,
        dropout=0.1,
        layers=2,
        parallel={"sharded_data_parallel_degree": 2},
        training={"sequences_per_step": 16, "microbatch_size": 2},
        data={"isolate_documents": True},
        optimizer={"name": "SGD", "learning_rate": 0.1, "clip_norm": 0.5, "options": {"momentum": 0.9}},
    )


def test_without_a_fault_everything_agrees(world_pool: WorldPool, job: Job) -> None:
    report = world_pool.run(4, verify_one, job)[0]
    assert report.agrees and not report.diagnosis and report.max_relative_error < 1e-9


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_names_the_fault(world_pool: WorldPool, job: Job, fault: str) -> None:
    report = world_pool.run(4, with_fault, job, fault)[0]
    assert not report.agrees
    assert report.fault == fault, f"named {report.fault!r}: {report.diagnosis}; first {report.first}"


@pytest.mark.parametrize("fault", ["decay_on_bias", "wrong_learning_rate", "lost_rank"])
def test_verify_names_faults_of_an_adam_in_fp32(world_pool: WorldPool, corpora: Path, fault: str) -> None:
    """Where the oracle is led by our gradients."""
    job = make_job(corpora, layers=2, precision={"compute": "fp32"}, training={"microbatch_size": 2})
    report = world_pool.run(2, with_fault, job, fault)[0]
    assert report.fault == fault, f"named {report.fault!r}: {report.diagnosis}; first {report.first}"
