"""Muon on every layout is Muon in one process: whole matrices, projections and experts apart, AdamW for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.job.schema import Job
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.faults.registry import FAULTS
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from tests.parity.jobs import tensor_job, verify_one

MUON: dict[str, Any] = {"name": "Muon", "learning_rate": 0.02, "adamw": {"learning_rate": 1e-3}}
FOUR_EXPERTS = {"num_local_experts": 4}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "shard 4": ("gpt2", 4, {}),
    "shard 2, replica 2": ("llama", 4, {"sharded_data_parallel_degree": 2}),
    "replica 2": ("llama", 2, {"sharded_data_parallel_degree": 1}),
    "tensor 2": ("gpt2", 2, {"tensor_parallel_degree": 2}),
    "pipeline 2": ("gpt2", 2, {"pipeline_parallel_degree": 2}),
    "tensor 2, pipeline 2": ("llama", 4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    "expert 2": ("mixtral", 2, {"expert_parallel_degree": 2}),
    "heads in copies": ("llama", 4, {"tensor_parallel_degree": 4}),
    "queries, keys and values by head": ("gpt_neox", 2, {"tensor_parallel_degree": 2}),
    "heads in groups": ("falcon", 2, {"tensor_parallel_degree": 2}),
}


def muon_job(corpora: Path, family: str = "gpt2", **sections: Any) -> Job:
    optimizer = MUON | sections.pop("optimizer", {})
    config = sections.pop("config", FOUR_EXPERTS if family == "mixtral" else {})
    return tensor_job(corpora, family, layers=2, config=config, optimizer=optimizer, **sections)


def verified(pool: WorldPool, ranks: int, job: Job) -> VerifyReport:
    report = pool.run(ranks, verify_one, job, 2)[0]
    assert report is not None and report.agrees, (report.first, report.diagnosis)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_one_process(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    family, ranks, parallel = LAYOUTS[layout]
    verified(world_pool, ranks, muon_job(corpora, family, parallel=parallel))


def test_a_rank_that_has_nothing_of_a_matrix_takes_part(world_pool: WorldPool, corpora: Path) -> None:
    verified(world_pool, 4, muon_job(corpora, config={"n_inner": 5}))  # two rows on each of the first ranks


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("llama", {"precision": {"compute": "bf16"}}),
    "fp32": ("llama", {"precision": {"compute": "fp32"}}),
    "lora, by blocks": ("llama", {"adapter": {"kind": "lora", "rank": 2}}),
    "dora, tensor 2": ("llama", {"adapter": {"kind": "dora", "rank": 2}, "parallel": {"tensor_parallel_degree": 2}}),
    "every rank": ("gpt2", {"parallel": {"shard_optimizer_state": True}}),
    "as AdamW's steps, no nesterov": (
        "gpt2", {"optimizer": {"options": {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "ns_steps": 3}}},
    ),
    "groups of AdamW with Muon": (
        "gpt2",
        {"optimizer": {"name": "AdamW", "learning_rate": 1e-3, "adamw": {}, "groups": [
            {"parameters": [r".*\.mlp\.c_fc\.weight"], "optimizer": "Muon", "learning_rate": 0.02},
            {"parameters": [".*ln_.*"], "optimizer": "SGD", "options": {"momentum": 0.9}},
        ]}},
    ),
    "two Muons with other options": (
        "gpt2",
        {"optimizer": {"groups": [
            {"parameters": [r".*\.mlp\.c_fc\.weight"], "optimizer": "Muon", "options": {"ns_steps": 3}},
        ]}},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_agree_with_one_process(world_pool: WorldPool, corpora: Path, variant: str) -> None:
    family, sections = VARIANTS[variant]
    verified(world_pool, 2, muon_job(corpora, family, **sections))


def trained(jobs: list[Job]) -> list[tuple[dict[str, Any], list[float], int]]:
    """Train each job from its newest checkpoint; (way of each matrix, losses, bytes of state on this rank)."""
    found = []
    for job in jobs:
        with Session(job, device=torch.device("cpu")) as session:
            session.restore()
            losses = []
            for batches in session.batches():
                losses.append(session.step(batches).loss)
                if session.steps_done == 2:
                    session.save(wait=True)
            found.append((session.plan.orthogonalized, losses, session.optimizer.state_bytes()))
    return found


def test_it_goes_on_on_another_layout(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    """A shard of two ranks and two tensor ranks that go on from it lose as one rank does alone."""
    kept = {"resume": "auto", "directory": str(tmp_path / "kept")}
    apart = {"directory": str(tmp_path / "alone")}
    alone = world_pool.run(1, trained, [muon_job(corpora, checkpoint=apart)])[0][0]
    split = {"tensor_parallel_degree": 2}
    jobs = [muon_job(corpora, checkpoint=kept), muon_job(corpora, checkpoint=kept, parallel=split)]
    (whole, _), (sharded, resumed) = alone[1:], [run[1] for run in world_pool.run(2, trained, jobs)[0]]
    assert sharded == pytest.approx(whole, rel=1e-9)
    assert resumed == pytest.approx(whole[2:], rel=1e-9)


def test_orthogonalized_slices_are_noticed(world_pool: WorldPool, corpora: Path) -> None:
    report = world_pool.run(2, verify_with, muon_job(corpora), "muon_of_slices")[0]
    assert report is not None and not report.agrees
    wrong = {difference.name for difference in report.differences if not difference.agrees}
    assert "transformer.h.0.mlp.c_fc.weight" in wrong


def verify_with(job: Job, fault: str) -> VerifyReport | None:
    with FAULTS[fault]():
        return verify_one(job)
