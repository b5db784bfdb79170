"""Experts that ranks share, against one process: with every other axis, and with tokens as uneven as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study
from tests.parity.jobs import check_agrees
from tests.parity.test_experts import FP32, FP64, NOISE, experts_job, initial, kept

EXPERT: dict[str, Any] = {"expert_parallel_degree": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_degree": 2}
CONTEXT: dict[str, Any] = {"context_parallel_degree": 2}
FOUR: dict[str, Any] = {"expert_parallel_degree": 4}
EAGER = {"experts_implementation": "eager"}  # grouped products do not compute in fp64

GROUPED = {"experts_implementation": "grouped_mm"}
FULL = {"activation_checkpointing": "full"}
ROWS = {**FULL, "keep_expert_rows": True}

QUICK = [
    ("mixtral", 2, {"parallel": EXPERT}),
    ("qwen3_moe", 4, {"parallel": {**EXPERT, **TENSOR}}),
    ("qwen3_moe", 4, {"parallel": {**EXPERT, **PIPELINE}}),
    ("qwen3_moe", 4, {"parallel": {**EXPERT, **CONTEXT}}),
]
SLOW = [
    ("qwen3_moe", 4, {"parallel": {**EXPERT, "sharded_data_parallel_degree": 2}, "memory": FULL}),
    ("qwen3_moe", 4, {"parallel": EXPERT}),
    ("qwen3_moe", 4, {"parallel": FOUR}),
    ("qwen3_moe", 4, {"parallel": {**FOUR, "sharded_data_parallel_degree": 1}}),
    ("qwen3_moe", 4, {"parallel": {**EXPERT, **TENSOR, "sequence_parallel": True}}),
    ("qwen3_moe", 8, {"parallel": {**FOUR, **TENSOR}}),
    ("qwen3_moe", 8, {"parallel": {**EXPERT, **TENSOR, **PIPELINE}}),
    ("qwen3_moe", 4, {"parallel": {**EXPERT, "shard_optimizer_state": True}}),
    ("qwen3_moe", 4, {"parallel": {**EXPERT, **PIPELINE, "pipeline": "zero_bubble"}}),
    ("qwen3_moe", 4, {"parallel": FOUR, "memory": {"activation_checkpointing": "selective"}}),
    ("qwen3_moe", 2, {"parallel": EXPERT, "memory": FULL}),
    ("qwen3_moe", 2, {"parallel": EXPERT, "memory": ROWS, "config": {"attention_dropout": 0.2}}),
    ("mixtral", 4, {"parallel": FOUR, "memory": FULL, "config": NOISE}),
    ("mixtral", 4, {"parallel": {**EXPERT, **TENSOR}, "memory": ROWS, "config": NOISE}),
    ("qwen3_moe", 4, {"parallel": FOUR, "memory": {**ROWS, "activation_checkpointing": "selective"}}),
    ("qwen3_moe", 4, {"parallel": {**EXPERT, **PIPELINE}, "memory": {**ROWS, "checkpoint_strategy": "contiguous"}}),
    ("mixtral", 2, {"parallel": EXPERT, "memory": {"offload_parameters": True}}),
    ("mixtral", 4, {"parallel": EXPERT, "config": NOISE}),
    ("qwen3_moe", 2, {"parallel": EXPERT, "precision": {"compute": "bf16"}}),
    ("qwen3_moe", 2, {"parallel": EXPERT, "config": GROUPED, **FP32}),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family, ranks, sections", CASES)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, family: str, ranks: int, sections: dict[str, Any]
) -> None:
    config = {**EAGER, **sections.get("config", {})}
    check_agrees(world_pool, ranks, experts_job(corpora, family, **{**FP64, **sections, "config": config}))


def test_a_stage_without_experts_agrees_with_one_process(world_pool: WorldPool, corpora: Path) -> None:
    config = {**EAGER, "mlp_only_layers": [0, 1]}
    job = experts_job(corpora, "qwen3_moe", parallel={**EXPERT, **TENSOR, **PIPELINE}, config=config, **FP64)
    facts = study(job)
    stages = resolve(job, World(8, "cpu", 8), facts).stages
    with_experts = [
        any(name.startswith(f"{block}.") for block in stage for name in facts.expert_stacks) for stage in stages
    ]
    assert with_experts == [False, True]
    check_agrees(world_pool, 8, job)


@pytest.mark.slow
def test_initial_weights_are_bit_equal(world_pool: WorldPool, corpora: Path) -> None:
    alone = world_pool.run(1, initial, experts_job(corpora, "mixtral"))[0]
    for ranks, parallel in ((2, EXPERT), (4, {**EXPERT, **TENSOR})):
        weights = world_pool.run(ranks, initial, experts_job(corpora, "mixtral", parallel=parallel))[0]
        assert weights.keys() == alone.keys()
        assert all(torch.equal(weights[name], alone[name]) for name in alone)


def test_a_rank_keeps_whole_experts(world_pool: WorldPool, corpora: Path) -> None:
    job = experts_job(corpora, "mixtral", parallel={**EXPERT, "sharded_data_parallel_degree": 1})
    for shapes in world_pool.run(4, kept, job):
        assert shapes == {
            "model.layers.1.mlp.gate.weight": (4, 32),
            "model.layers.1.mlp.experts.gate_up_proj": (2, 32, 32),
            "model.layers.1.mlp.experts.down_proj": (2, 32, 16),
        }


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "family, task, reason",
    [
        ("switch_transformers", "seq2seq_lm", "drop tokens beyond their capacity"),
        ("doge", "causal_lm", "no stack of experts that is called in a way of transformers'"),
        ("longcat_flash", "causal_lm", "does not say in 'num_experts' how many experts it has"),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(family: str, task: str, reason: str) -> None:
    job = Job.model_validate({"model": {"config": toy_config(family), "task": task}})
    assert reason in study(job).supports(Axis.EXPERT).reason
