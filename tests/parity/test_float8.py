"""Float8 on layouts: rowwise scales give the same numbers on each, verify knows its rounding, training trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.job.schema import Job
from shardwise.launch.interrupt import Interrupt
from shardwise.testing.capture import capture_step
from shardwise.testing.comparison import Tolerance, VerifyReport, compare_tensors
from shardwise.testing.faults.registry import FAULTS
from shardwise.testing.reference import FLOAT8
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from shardwise.training.setup import set_up
from shardwise.training.trainer import Trainer
from tests.parity.jobs import VOCABULARY, tensor_job, verify_one

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2},
    "gpt2": {"n_embd": 64, "n_inner": 160, "n_layer": 2},
}
TENSOR = {"tensor_parallel_degree": 2}


def float8_job(corpora: Path, family: str, scaling: str = "rowwise", compute: str = "fp32", **sections: Any) -> Job:
    """Every linear layer of the blocks in emulated float8; SGD, 8 sequences a step."""
    base: dict[str, Any] = {
        "precision": {"compute": compute, "fp8": "emulate", "fp8_scaling": scaling, "fp8_layers": "all"},
        "optimizer": {"name": "SGD", "learning_rate": 0.1},
        "training": {"sequences_per_step": 8, "steps": 4},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return tensor_job(corpora, family, config=CONFIGS[family], **base)


def steps(job: Job, count: int) -> tuple[list[float], dict[str, Tensor], tuple[str, ...]]:
    """Losses of `count` steps, the gradients of the first, what is in float8; on every rank of a world."""
    session = Session.of(set_up(job, torch.device("cpu")))
    trainer = Trainer(session, Interrupt(session.rank))
    captured = [capture_step(trainer, batches) for batches, _ in zip(session.batches(), range(count), strict=False)]
    return [each.loss for each in captured], captured[0].gradients, session.plan.float8


def with_fault(job: Job, fault: str) -> VerifyReport | None:
    with FAULTS[fault]():
        return verify_one(job, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, sections",
    [
        ("llama", {}),
        pytest.param(
            *("gpt2", {"parallel": TENSOR, "memory": {"activation_checkpointing": "full"}}), marks=pytest.mark.slow
        ),
        pytest.param(
            *("llama", {"parallel": {**TENSOR, "sequence_parallel": True}, "training": {"microbatch_size": 4}}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("gpt2", {"parallel": {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble"}}), marks=pytest.mark.slow
        ),
    ],
)
def test_rowwise_scales_give_every_layout_the_same_gradients(
    world_pool: WorldPool, corpora: Path, family: str, sections: dict[str, Any]
) -> None:
    """Scales are powers of two: what else shares a row moves a number's exponent and not how it is rounded.

    A number that lies between two of float8 goes up or down by what layouts differ in fp32, and all gradients before it
    follow. That is one draw of weights in several; a scale of one's own would show in each.
    """
    worst = []
    for seed in (0, 1, 2):
        training = {**sections.get("training", {}), "seed": seed}
        alone, expected, layers = world_pool.run(1, steps, float8_job(corpora, family, training={"seed": seed}), 1)[0]
        job = float8_job(corpora, family, **{**sections, "training": training})
        split, gradients, _ = world_pool.run(2, steps, job, 1)[0]
        assert len(layers) == (14 if family == "llama" else 8)
        assert split == pytest.approx(alone, rel=1e-5)
        found = compare_tensors(0, "gradient", gradients, expected, Tolerance(2e-3))
        worst.append(max(found, key=lambda each: each.error))
    assert sum(each.agrees for each in worst) >= 2, worst
    assert all(each.error < 0.05 for each in worst), worst


def gathered(job: Job) -> Job:
    return job.model_copy(update={"precision": job.precision.model_copy(update={"fp8_all_gather": True})})


@pytest.mark.parametrize(
    "family, ranks, sections",
    [
        pytest.param("llama", 3, {"training": {"sequences_per_step": 6}}, marks=pytest.mark.slow),
        # By place: of documents drawn by hash, two elements lie where a sum in another order rounds them to the next
        # float8 number, and the gradients of those columns differ by up to 1.5e-2.
        pytest.param(
            *("gpt2", 4),
            {"parallel": {**TENSOR, "sharded_data_parallel_degree": 2}, "data": {"validation_split": "place"}},
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt2", 2, {"parallel": {"shard_optimizer_state": True}}, marks=pytest.mark.slow),
    ],
)
def test_weights_that_were_gathered_in_float8_are_multiplied_as_if_they_had_been_gathered_whole(
    world_pool: WorldPool, corpora: Path, family: str, ranks: int, sections: dict[str, Any]
) -> None:
    """Powers of two both times: what the second rounding finds is rounded already."""
    job = float8_job(corpora, family, **sections)
    whole, expected, _ = world_pool.run(ranks, steps, job, 2)[0]
    losses, gradients, _ = world_pool.run(ranks, steps, gathered(job), 2)[0]
    assert losses == pytest.approx(whole, rel=1e-5)
    found = compare_tensors(0, "gradient", gradients, expected, Tolerance(2e-3))
    assert all(each.agrees for each in found), max(found, key=lambda each: each.error)


@pytest.mark.slow
@pytest.mark.parametrize("family, scaling, parallel", [("llama", "tensorwise", {}), ("gpt2", "rowwise", TENSOR)])
def test_verify_holds_float8_to_its_rounding(
    world_pool: WorldPool, corpora: Path, family: str, scaling: str, parallel: dict[str, Any]
) -> None:
    job = float8_job(corpora, family, scaling, "bf16", parallel=parallel)
    report = world_pool.run(2, verify_one, job)[0]
    assert report.agrees and FLOAT8 in report.notes, (report.first, report.diagnosis)
    worst = max(each.error for each in report.differences if each.quantity == "gradient")
    assert worst > 2.5e-2  # float8 has run: bf16 alone is within 2e-2 there


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ["lost_rank", "mean_for_sum"])
def test_verify_still_finds_what_is_larger_than_rounding(world_pool: WorldPool, corpora: Path, fault: str) -> None:
    job = float8_job(corpora, "gpt2", training={"sequences_per_step": 8, "microbatch_size": 2})
    report = world_pool.run(2, with_fault, job, fault)[0]
    assert report is not None and report.fault == fault


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_training_in_float8_trains(world_pool: WorldPool, tmp_path: Path, scaling: str) -> None:
    """On documents that count upwards; beside the same training without float8."""
    documents = [{"input_ids": [(start + step) % VOCABULARY for step in range(40)]} for start in range(VOCABULARY)]
    (tmp_path / "tokens.jsonl").write_text("\n".join(map(json.dumps, documents)))
    job = float8_job(
        tmp_path, "llama", scaling, training={"steps": 10}, optimizer={"name": "AdamW", "learning_rate": 3e-3}
    )
    none = {"fp8": "none", "fp8_scaling": "tensorwise", "fp8_layers": "auto"}
    plain = job.model_copy(update={"precision": job.precision.model_copy(update=none)})
    losses, exact = (world_pool.run(1, steps, each, 10)[0][0] for each in (job, plain))
    assert losses[-1] < losses[0] - 0.5 and losses != exact
    assert losses == pytest.approx(exact, rel=2e-2)
