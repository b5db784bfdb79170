"""Verify names each planted fault, and finds nothing where none is planted."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.job.schema import Job
from shardwise.testing.capture import gather
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.copies import compare_copies
from shardwise.testing.faults.registry import FAULTS
from shardwise.testing.world import WorldPool
from shardwise.training.setup import assemble, prepare_data, study
from tests.parity.jobs import check_agrees, facts_of, make_job, verify_one
from tests.studied import each_rank_studies

DIVIDING = ("Adam", "Adamax", "NAdam", "RAdam", "Adagrad")  # by the size of the gradient

QUICK = ("stale_shard",)
# Faults that need replicas, ties, dropout and documents at once; tests/parity/planted_faults.csv has the others.
OF_THE_JOB = (
    "lost_rank", "lost_microbatch", "doubled_rank", "doubled_microbatch", "mean_for_sum", "missing_replica_reduction",
    "broken_tie", "shifted_label", "leaked_document", "stale_dropout", "wrong_loss", "wrong_norm", "stale_shard",
    "clip_skipped", "clip_twice", "wrong_learning_rate", "replicas_apart", "unknown_gradient", "left_in_evaluation",
)  # fmt: skip


def with_fault(job: Job, fault: str) -> VerifyReport | None:
    own_facts = each_rank_studies() if fault == "broken_tie" else nullcontext()  # it lies in how the model is built
    with FAULTS[fault](), own_facts:
        return verify_one(job, facts=study(job))


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


def job_of(corpora: Path, fault: str, job: Job) -> tuple[int, Job]:
    """Return the ranks and the job on which a fault is planted: a small one where the fault needs its own axis."""
    if fault == "replicas_apart":
        return 2, make_job(corpora, layers=1, parallel={"tensor_parallel_degree": 2})
    if fault in ("left_in_evaluation", "unknown_gradient"):
        return 2, make_job(corpora, layers=1)
    return 4, job


def slow_adam(corpora: Path, compute: str) -> Job:
    """A job whose parameters hardly move: the first steps of a long warm-up to a small rate."""
    optimizer = {"learning_rate": 2e-5, "warmup_steps": 100, "weight_decay": 0.1}
    training = {"steps": 1000, "sequences_per_step": 2}
    return make_job(corpora, layers=1, precision={"compute": compute}, optimizer=optimizer, training=training)


def test_without_a_fault_everything_agrees(world_pool: WorldPool, job: Job) -> None:
    report = world_pool.run(4, verify_one, job)[0]
    assert report.agrees and not report.diagnosis and report.max_relative_error < 1e-9


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in OF_THE_JOB]
)
def test_verify_names_the_fault(world_pool: WorldPool, corpora: Path, job: Job, fault: str) -> None:
    ranks, planted_in = job_of(corpora, fault, job)
    report = world_pool.run(ranks, with_fault, planted_in, fault)[0]
    assert not report.agrees
    assert report.fault == fault, f"named {report.fault!r}: {report.diagnosis}; first {report.first}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["decay_on_bias", "wrong_learning_rate", "lost_rank"])
def test_verify_names_faults_of_an_adam_in_fp32(world_pool: WorldPool, corpora: Path, fault: str) -> None:
    """Where the oracle is led by our gradients."""
    job = make_job(corpora, layers=2, precision={"compute": "fp32"}, training={"microbatch_size": 2})
    report = world_pool.run(2, with_fault, job, fault)[0]
    assert report.fault == fault, f"named {report.fault!r}: {report.diagnosis}; first {report.first}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RMSprop", *(pytest.param(name, marks=pytest.mark.slow) for name in DIVIDING)])
def test_rounding_of_which_an_optimizer_makes_a_step_is_no_fault(
    world_pool: WorldPool, corpora: Path, name: str
) -> None:
    settings = {"name": name, "weight_decay": 0.1}
    check_agrees(world_pool, 2, make_job(corpora, precision={"compute": "fp32"}, optimizer=settings))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compute", ["fp64", "fp32"])
def test_small_updates_agree_without_a_fault(world_pool: WorldPool, corpora: Path, compute: str) -> None:
    report = world_pool.run(2, verify_one, slow_adam(corpora, compute))[0]
    assert report.agrees, (report.first, report.diagnosis)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["wrong_eps", "late_correction", "no_update"])
def test_small_updates_are_judged_in_fp32(world_pool: WorldPool, corpora: Path, fault: str) -> None:
    report = world_pool.run(2, with_fault, slow_adam(corpora, "fp32"), fault)[0]
    assert report.fault == fault, f"named {report.fault!r}: {report.diagnosis}; first {report.first}"


def test_where_it_begins_and_on_which_rank(world_pool: WorldPool, corpora: Path) -> None:
    report = world_pool.run(2, with_fault, make_job(corpora, layers=1), "unknown_gradient")[0]
    assert "begins at transformer.ln_f on rank 1:" in report.diagnosis, report.diagnosis


def memory_around_verify(job: Job) -> tuple[list[bool], bool]:
    """Fill each rank's memory with numbers of its own, look at all of it, and return whether it stayed equal."""
    assembled = assemble(job, torch.device("cpu"), facts_of(job), prepare_data(job, facts_of(job)))
    rank = dist.get_rank()
    tensors = []
    with torch.no_grad():
        for entry in assembled.model.tensor_map:
            entry.local.add_(rank)
            entry.parameter.grad = torch.full_like(entry.parameter, float(rank + 1))
            tensors += [entry.local, entry.local_gradient]
    before = [tensor.clone() for tensor in tensors]
    gather(assembled, gradients=True)
    gather(assembled)
    copies = compare_copies(assembled, gradients=True)
    return [torch.equal(*pair) for pair in zip(tensors, before, strict=True)], any(c.error for c in copies.values())


@pytest.mark.parametrize("axis", ["pipeline_parallel_degree", "tensor_parallel_degree"])
def test_verify_does_not_touch_what_it_judges(world_pool: WorldPool, corpora: Path, axis: str) -> None:
    job = make_job(corpora, layers=2, parallel={axis: 2})
    for unchanged, copies_differ in world_pool.run(2, memory_around_verify, job):
        assert unchanged and all(unchanged) and copies_differ
