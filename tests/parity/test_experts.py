"""Models of experts against one process: sharding, tensor ranks, stages, split sequences, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import LegalityError
from shardwise.job.schema import Job
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve
from shardwise.testing.capture import gather
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up, study
from tests.parity.jobs import LENGTH, VOCABULARY, check_agrees, make_job

# An expert is 16 or 8 features wide: grouped products read 4 in fp32 at once, on each of two tensor ranks too.
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "intermediate_size": 16, "max_position_embeddings": LENGTH,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **COMMON, "num_local_experts": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **COMMON, **EXPERTS, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {"model_type": "qwen3_moe", **COMMON, **EXPERTS, "head_dim": 8},
    "glm4_moe": {
        "model_type": "glm4_moe", **COMMON, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 8, "first_k_dense_replace": 1, "head_dim": 8, "n_group": 1, "topk_group": 1,
    },
    "dots1": {
        "model_type": "dots1", **COMMON, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 8, "first_k_dense_replace": 1, "head_dim": 8, "n_group": 1, "topk_group": 1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", **COMMON, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6,
    },
}  # fmt: skip
FP32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"name": "SGD", "learning_rate": 0.1}}
TWO: dict[str, Any] = {"pipeline_parallel_degree": 2}
CONTEXT: dict[str, Any] = {"context_parallel_degree": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
NOISE = {"router_jitter_noise": 0.1, "attention_dropout": 0.1}
DROPPED = {"attention_dropout": 0.1}
# 13 features are shared unevenly, and fp64 is computed, where experts are not grouped.
UNGROUPED = {"experts_implementation": "batched_mm", "intermediate_size": 13}
FP64: dict[str, Any] = {"precision": {"compute": "fp64"}, "optimizer": {"name": "AdamW"}}
UNEVEN = {"sequences_per_step": 7, "microbatch_size": 2}


def experts_job(directory: Path, family: str, **sections: Any) -> Job:
    model = {"config": {**MODELS[family], **sections.pop("config", {})}, "attention": "eager"}
    return make_job(directory, model=model, **{"training": UNEVEN, **FP32, **sections})


SLOW = [
    ("mixtral", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 2}}),
    ("mixtral", 2, {"parallel": CONTEXT}),
    ("qwen3_moe", 2, {"parallel": TWO}),
    ("qwen3_moe", 2, {"parallel": CONTEXT}),
    ("qwen2_moe", 2, {"parallel": TWO, "memory": {"activation_checkpointing": "full"}}),
    ("qwen2_moe", 4, {"parallel": {**TWO, **CONTEXT}}),
    ("mixtral", 2, {"parallel": {**TWO, "pipeline": "zbv"}, "config": {"num_hidden_layers": 5},
                    "training": {"sequences_per_step": 8, "gradient_accumulation": 8}}),
    ("mixtral", 4, {"parallel": {"sharded_data_parallel_degree": 2}, "memory": {"activation_checkpointing": "full"}}),
    ("mixtral", 2, {"parallel": CONTEXT, "config": NOISE}),
    ("mixtral", 2, {"parallel": TENSOR, "config": {"tie_word_embeddings": True}}),
    ("mixtral", 4, {"parallel": {"tensor_parallel_degree": 4}, "config": {**UNGROUPED, **NOISE}, **FP64}),
    ("mixtral", 8, {"parallel": {**TENSOR, **TWO}, "config": NOISE}),
    ("mixtral", 4, {"parallel": {**TENSOR, **CONTEXT}, "config": NOISE}),
    ("mixtral", 2, {"parallel": TENSOR, "precision": {"compute": "bf16"}}),
    ("mixtral", 2, {"parallel": TENSOR, "config": {"experts_implementation": "eager"},
                    "memory": {"activation_checkpointing": "full"}}),
    ("qwen2_moe", 2, {"parallel": TENSOR}),
    ("qwen2_moe", 4, {"parallel": SEQUENCE}),
    ("qwen3_moe", 2, {"parallel": SEQUENCE, "config": {"mlp_only_layers": [0]}}),
    *((family, 2, {"parallel": parallel}) for family in ("glm4_moe", "dots1")
      for parallel in (TENSOR, SEQUENCE)),
    ("deepseek_v3", 4, {"parallel": {**SEQUENCE, "sharded_data_parallel_degree": 2}, "config": DROPPED}),
    ("deepseek_v3", 4, {"parallel": {**TENSOR, **TWO}, "config": {**DROPPED, "q_lora_rank": None}}),
    ("deepseek_v3", 4, {"parallel": {**TENSOR, **CONTEXT}, "memory": {"activation_checkpointing": "full"}}),
]  # fmt: skip
CASES = [
    ("mixtral", 2, {"parallel": TWO}),
    ("mixtral", 2, {"parallel": TENSOR, "config": {**UNGROUPED, **NOISE}, **FP64}),
    ("mixtral", 4, {"parallel": {**SEQUENCE, "sharded_data_parallel_degree": 2}, "config": NOISE}),
    ("mixtral", 4, {"parallel": {**TENSOR, **TWO}, "config": {**UNGROUPED, **NOISE}, **FP64}),
    ("qwen3_moe", 2, {"parallel": TENSOR, "config": {"mlp_only_layers": [0]}}),
    ("deepseek_v3", 2, {"parallel": TENSOR, "config": {**DROPPED, "experts_implementation": "eager"}, **FP64}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family, ranks, settings", CASES)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, family: str, ranks: int, settings: dict[str, Any]
) -> None:
    check_agrees(world_pool, ranks, experts_job(corpora, family, **settings))


def initial(job: Job) -> dict[str, Tensor]:
    return gather(set_up(job, torch.device("cpu")))


@pytest.mark.slow
def test_initial_weights_are_bit_equal(world_pool: WorldPool, corpora: Path) -> None:
    alone = world_pool.run(1, initial, experts_job(corpora, "mixtral", config=UNGROUPED))[0]
    for ranks, parallel in ((2, TENSOR), (4, TENSOR), (4, {**TENSOR, **TWO})):
        found = world_pool.run(ranks, initial, experts_job(corpora, "mixtral", config=UNGROUPED, parallel=parallel))[0]
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], alone[name]) for name in alone)


def kept(job: Job) -> dict[str, tuple[int, ...]]:
    """Shapes on this rank."""
    run = set_up(job, torch.device("cpu"))
    return {entry.name: tuple(entry.local.shape) for entry in run.model.tensor_map if "layers.1.mlp" in entry.name}


def test_a_rank_keeps_its_part_of_every_expert(world_pool: WorldPool, corpora: Path) -> None:
    job = experts_job(corpora, "mixtral", config=UNGROUPED, parallel={**TENSOR, "sharded_data_parallel_degree": 1})
    for features, shapes in zip((7, 6), world_pool.run(2, kept, job), strict=True):
        assert shapes == {
            "model.layers.1.mlp.gate.weight": (4, 32),
            "model.layers.1.mlp.experts.gate_up_proj": (4, 2 * features, 32),
            "model.layers.1.mlp.experts.down_proj": (4, 32, features),
        }


def test_widths_that_grouped_products_cannot_read_are_refused(corpora: Path) -> None:
    job = experts_job(corpora, "mixtral", parallel=TENSOR, config={"intermediate_size": 12})
    with pytest.raises(LegalityError, match=r"6 of an expert's 12 inner features in fp32 .* batched_mm in the model"):
        resolve(job, World(2, "cpu", 2), study(job))
    job = experts_job(corpora, "mixtral", parallel=TENSOR, config=UNGROUPED)
    assert resolve(job, World(2, "cpu", 2), study(job)).degrees["tensor"] == 2
