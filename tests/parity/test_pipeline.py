"""Pipeline stages against one process: schedules, ties across the ends, uneven cuts, and every other axis beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.config import Job
from shardwise.testing.capture import gather
from shardwise.testing.world import WorldPool
from shardwise.training.sample import generate
from shardwise.training.setup import set_up
from tests.parity.jobs import tensor_job, verify_one

TWO: dict[str, Any] = {"pipeline_parallel_degree": 2}
FOUR: dict[str, Any] = {"pipeline_parallel_degree": 4}
ALL: dict[str, Any] = {**TWO, "tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}
FP32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"name": "SGD", "learning_rate": 0.1}}
UNEVEN = {"sequences_per_step": 7, "microbatch_size": 2}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    # 1F1B and fill-drain, blocks that stages do not divide, a ragged last microbatch, ties across the ends
    ("gpt2", 2, {"parallel": TWO, "dropout": 0.1, "layers": 3}),
    ("gpt2", 2, {"parallel": {**TWO, "pipeline": "simple"}, "training": UNEVEN, "dropout": 0.1}),
    ("gpt2", 4, {"parallel": FOUR, "layers": 5, "training": UNEVEN, "dropout": 0.1}),
    ("gpt2", 2, {"parallel": {**TWO, "pipeline": "simple"}, "training": {"gradient_accumulation": 1}}),
    # virtual stages
    ("gpt2", 2, {"parallel": {**TWO, "virtual_pipeline_degree": 2}, "layers": 5, "dropout": 0.1}),
    ("gpt_neox", 4, {"parallel": {**TWO, "virtual_pipeline_degree": 3}, "layers": 7, "training": UNEVEN}),
    ("llama", 4, {"parallel": {**FOUR, "virtual_pipeline_degree": 2}, "layers": 9}),
    # sharding, replicas, ZeRO-1, and the placements
    ("gpt2", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 2}, "dropout": 0.1, "training": UNEVEN}),
    ("gpt2", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 1}, "tied": False}),
    ("llama", 8, {"parallel": {**TWO, "sharded_data_parallel_degree": 2, "placement_strategy": "PDT"}}),
    ("gpt2", 4, {"parallel": {**TWO, "shard_optimizer_state": True}}),
    ("gpt2", 4, {"parallel": {**TWO, "reshard_after_forward": False}}),
    ("gpt2", 4, {"parallel": {**TWO, "virtual_pipeline_degree": 2, "prefetch_depth": 0}, "layers": 4}),
    # tensors
    ("gpt2", 4, {"parallel": {**TWO, "tensor_parallel_degree": 2}, "dropout": 0.1, "layers": 3}),
    ("qwen3", 8, {"parallel": ALL}),
    ("llama", 8, {"parallel": {**ALL, "placement_strategy": "spread"}, "tied": False}),
    # memory and precision
    ("gpt2", 2, {"parallel": TWO, "memory": {"activation_checkpointing": "full"}, "dropout": 0.1}),
    ("gpt2", 4, {"parallel": TWO, "memory": {"activation_checkpointing": "selective"}, "dropout": 0.1}),
    ("llama", 4, {"parallel": TWO, "memory": {"activation_checkpointing": "full", "offload_activations": True}}),
    ("llama", 2, {"parallel": TWO, "layers": 4,
                  "memory": {"activation_checkpointing": "full", "checkpoint_strategy": "group_2"}}),
    ("llama", 4, {"parallel": TWO, "memory": {"offload_parameters": True}}),
    ("gpt_neox", 4, {"parallel": TWO, "precision": {"compute": "bf16"}}),
    ("llama", 4, {"parallel": TWO, "precision": {"compute": "fp16"}}),
    ("gpt_neox", 2, {"parallel": TWO, **FP32}),
    # the other families
    ("mistral", 2, {"parallel": TWO, "layers": 3}),
    ("gemma", 2, {"parallel": TWO, "layers": 3}),
    ("gptj", 2, {"parallel": TWO, "layers": 3, "dropout": 0.1, **FP32}),  # its attention computes in fp32
    ("gpt_neo", 4, {"parallel": FOUR, "layers": 5, "dropout": 0.1}),
    ("opt", 2, {"parallel": TWO, "layers": 3, "dropout": 0.1}),
    ("bert", 2, {"parallel": TWO, "layers": 3, "dropout": 0.1}),
    ("roberta", 4, {"parallel": TWO, "layers": 3, "dropout": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize("family, ranks, settings", CASES)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, family: str, ranks: int, settings: dict[str, Any]
) -> None:
    report = world_pool.run(ranks, verify_one, tensor_job(corpora, family, **settings))[0]
    assert report is not None
    assert report.agrees, (report.first, report.diagnosis)
