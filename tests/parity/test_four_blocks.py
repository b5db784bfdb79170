"""Models of four blocks that once had wrong numbers, or an error without a name, on one layout each.

The sweep's toys have two blocks, sixteen positions and one row a microbatch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from benchmarks import coverage
from shardwise.job.schema import Job
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from tests.parity.jobs import check_agrees

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
GROUPS = {**WIDE, "num_key_value_heads": 2}
QUICK: list[tuple[str, str, str, str, dict[str, Any]]] = [  # task, type, layout, dtype, config
    # Weights that are not trained and that later stages' blocks are given.
    ("masked_lm", "roformer", "pipeline 2", "fp64", {**WIDE, "embedding_size": 64}),
    # No list of blocks, an embedding that the last stage's head shares, and a pooler whose output nobody reads.
    ("masked_lm", "squeezebert", "pipeline 2", "fp64", {**WIDE, "embedding_size": 64}),
    # Experts for which transformers takes grouped products, which have no fp64.
    ("causal_lm", "mixtral", "sharded 2", "fp64", {**GROUPS, "num_local_experts": 4}),
    # Values for each layer; in fp32 rounding moves a gradient by more than it is held to otherwise.
    (
        "causal_lm",
        "gemma4_text",
        "sharded 2",
        "fp32",
        {
            **GROUPS,
            "head_dim": 16,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "per_layer_config": {"3": {"head_dim": 32, "num_key_value_heads": 1}},
            "attention_k_eq_v": True,
            "enable_moe_block": False,
        },
    ),
]
SLOW: list[tuple[str, str, str, str, dict[str, Any]]] = [
    # Positions that a function of the module's file makes.
    ("masked_lm", "esm", "context 2", "fp64", {**WIDE, "pad_token_id": 1, "mask_token_id": 3, "token_dropout": False}),
    # An indexer beside the attention that transformers' interface knows.
    ("causal_lm", "deepseek_v32", "context 2", "fp32", {"num_hidden_layers": 4}),
    # Buffers that a parent's initializer fills.
    ("causal_lm", "falcon_h1", "sharded 2", "fp32", {"num_hidden_layers": 4}),
    # Later stages without input_ids.
    ("causal_lm", "llama4_text", "pipeline 2", "fp32", {
        **GROUPS, "intermediate_size_mlp": 128, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_layers": [0, 1, 2, 3], "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 16,
    }),
    # Modules without an initializer.
    ("causal_lm", "openai-gpt", "sharded 2", "fp32", {"n_embd": 64, "n_head": 4, "n_layer": 4}),
    # Experts of which only some have a token.
    ("seq2seq_lm", "switch_transformers", "sharded 2", "fp32", {"num_layers": 4, "num_decoder_layers": 4}),
    # Attention dropout inside a fused kernel.
    ("seq2seq_lm", "t5", "one process", "fp32", {"dropout_rate": 0.1}),
    # Weights that blocks share.
    ("causal_lm", "zamba2", "sharded 2", "fp32", {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    "task, model_type, layout, dtype, config", [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_four_blocks_agree_with_one_process(
    world_pool: WorldPool, tmp_path: Path, task: str, model_type: str, layout: str, dtype: str, config: dict[str, Any]
) -> None:
    if model_type == "roformer" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("it is refused by name: its forward switches gradients off there")
    coverage.write_corpora(tmp_path)
    sections = coverage.toy_job(tmp_path, task, model_type, layout, dtype).model_dump(mode="json", exclude_unset=True)
    config = {**config, "vocab_size": sections["data"].get("vocabulary_size", coverage.VOCABULARY)}
    sections["model"]["config"] = toy_config(model_type, **config)
    sections["data"]["sequence_length"] = 48
    sections["training"]["microbatch_size"] = 2
    check_agrees(world_pool, coverage.LAYOUTS[layout][0], Job.model_validate(sections))
