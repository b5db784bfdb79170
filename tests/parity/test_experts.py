"""Models of experts (Mixtral, Qwen-MoE) against one process: sharding, stages, split sequences, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from shardwise.config import Job
from shardwise.draft import World
from shardwise.errors import LegalityError, ModelError
from shardwise.plan import resolve
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study
from tests.parity.jobs import LENGTH, VOCABULARY, check_agrees, make_job

# Widths of which transformers' grouped products can be probed: multiples of 8.
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "intermediate_size": 16, "max_position_embeddings": LENGTH,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **COMMON, "num_local_experts": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **COMMON, **EXPERTS, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {"model_type": "qwen3_moe", **COMMON, **EXPERTS, "head_dim": 8},
}
FP32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"name": "SGD", "learning_rate": 0.1}}
TWO: dict[str, Any] = {"pipeline_parallel_degree": 2}
CONTEXT: dict[str, Any] = {"context_parallel_degree": 2}
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
]  # fmt: skip
CASES = [
    ("mixtral", 2, {"parallel": TWO}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize("family, ranks, settings", CASES)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, family: str, ranks: int, settings: dict[str, Any]
) -> None:
    check_agrees(world_pool, ranks, experts_job(corpora, family, **settings))


@pytest.mark.parametrize("family", MODELS)
def test_experts_are_not_split_over_tensor_ranks(world_pool: WorldPool, corpora: Path, family: str) -> None:
    """Where transformers' plan asks for it, as 5.23's do; 5.17's for Qwen2-MoE leaves the experts whole."""
    job = experts_job(corpora, family, parallel={"tensor_parallel_degree": 2})
    if "moe_tp_experts" not in CONFIG_MAPPING[family].base_model_tp_plan.values():
        check_agrees(world_pool, 2, job)
        return
    with pytest.raises(LegalityError, match=r"plan for .* asks for moe_tp_experts"):
        resolve(job, World(2, "cpu", 2), study(job))


def test_a_loss_of_the_router_is_refused(corpora: Path) -> None:
    with pytest.raises(ModelError, match=r"output_router_logits=True .* set it to false"):
        study(experts_job(corpora, "mixtral", config={"output_router_logits": True}))
