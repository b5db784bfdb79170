"""What a block keeps: the formulas against autograd's own account of unmodified transformers blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.replacements import fuse_activations
from shardwise.planner.formulas.activations import (
    BlockKind,
    LocalMicrobatch,
    ModuleMemory,
    backward_peak,
    kept_bytes,
    modules_of_block,
    saved_bytes,
)

BATCH, SEQUENCE, VOCABULARY = 2, 48, 64
SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 8}  # fmt: skip
GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
           "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neox": {**SIZES, "hidden_size": 64, "intermediate_size": 192},
    "gpt2": {"vocab_size": VOCABULARY, "n_positions": 64, "n_layer": 3, "n_head": 4, "n_embd": 64, **dict.fromkeys(
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)},
    "llama": {**SIZES, "hidden_size": 64, "intermediate_size": 176, "num_key_value_heads": 2},
    "mistral": {**SIZES, "hidden_size": 64, "intermediate_size": 176, "num_key_value_heads": 4},
    "qwen3": {**SIZES, "hidden_size": 64, "intermediate_size": 176, "num_key_value_heads": 2, "head_dim": 24},
    "gemma": {**SIZES, "hidden_size": 64, "intermediate_size": 176, "num_key_value_heads": 2, "head_dim": 24},
    "mixtral": {**SIZES, "hidden_size": 64, "intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2_moe": {**SIZES, "hidden_size": 64, "num_key_value_heads": 2, **EXPERTS,
                  "shared_expert_intermediate_size": 80},
    "qwen3_moe": {**SIZES, "hidden_size": 64, "num_key_value_heads": 2, **EXPERTS, "head_dim": 24},
    "opt": {**SIZES, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 192, "dropout": 0.0},
    "minicpm3": {**SIZES, "hidden_size": 64, "intermediate_size": 176, **LATENT, "v_head_dim": 24},
    "deepseek_v3": {**SIZES, "hidden_size": 64, "intermediate_size": 176, **LATENT, "v_head_dim": 24, **GROUPED},
}  # fmt: skip


def facts_of(family: str, **more: Any) -> ModelFacts:
    config = {"model_type": family, **CONFIGS[family], **more}
    job = Job.model_validate({"model": {"config": config}, "data": {"sequence_length": SEQUENCE}})
    return discover(build_model(job), job)


class SavedInBlock:
    """Distinct storages that autograd saves while `block` runs, without the model's; held, so that none is reused."""

    def __init__(self, model: nn.Module, block: nn.Module) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.inside = False
        block.register_forward_pre_hook(lambda *_: setattr(self, "inside", True))
        block.register_forward_hook(lambda *_: setattr(self, "inside", False))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self.inside and storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage
        return tensor

    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def saved_by_autograd(family: str, facts: ModelFacts, dtype: torch.dtype = torch.float32, **more: Any) -> int:
    """Bytes that autograd saves in the second block of transformers' model."""
    config = CONFIG_MAPPING[family](**{**CONFIGS[family], **more}, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    fuse_activations(model)
    saved = SavedInBlock(model, model.get_submodule(facts.blocks[1].name))
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        model(input_ids=torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)), use_cache=False)
    return saved.bytes()


def pieces_of(facts: ModelFacts, **more: Any) -> list[ModuleMemory]:
    shape = {"tokens": BATCH * SEQUENCE, "sequence": SEQUENCE, "bytes": 4, **more}
    return modules_of_block(facts, BlockKind.of(facts), LocalMicrobatch(**shape))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", CONFIGS)
def test_saved_bytes_are_those_of_autograd(family: str) -> None:
    facts = facts_of(family)
    assert saved_bytes(pieces_of(facts)) == pytest.approx(saved_by_autograd(family, facts), rel=0.03)


@pytest.mark.parametrize("rank", [24, None])
def test_values_of_another_size_than_queries_are_not_fused_on_a_cpu(rank: int | None) -> None:
    more = {"v_head_dim": 16, "q_lora_rank": rank}
    facts = facts_of("minicpm3", **more)
    predicted = saved_bytes(pieces_of(facts, attention="math"))
    assert facts.latent and facts.latent.is_uneven
    assert predicted == pytest.approx(saved_by_autograd("minicpm3", facts, **more), rel=0.03)


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "minicpm3"])
def test_saved_bytes_in_bf16(family: str) -> None:
    facts = facts_of(family)
    predicted = saved_bytes(pieces_of(facts, bytes=2))
    assert predicted == pytest.approx(saved_by_autograd(family, facts, torch.bfloat16), rel=0.03)


def test_a_window_has_a_mask_for_which_keys_are_copied_for_each_query_head() -> None:
    """Torch's kernels take no groups of heads together with a mask, which the blocks share."""
    window = {"sliding_window": 16, "num_key_value_heads": 2}
    facts = facts_of("mistral", **window)
    mask = 4 * SEQUENCE * SEQUENCE * BATCH
    found = saved_by_autograd("mistral", facts, **window) - mask
    assert saved_bytes(pieces_of(facts, attention="efficient")) == pytest.approx(found, rel=0.03)
    assert saved_bytes(pieces_of(facts)) < 0.97 * found
    half = saved_bytes(pieces_of(facts, attention="efficient", masked=0.5))
    assert half == (saved_bytes(pieces_of(facts)) + saved_bytes(pieces_of(facts, attention="efficient"))) / 2


def test_saved_bytes_of_eager_attention() -> None:
    facts = facts_of("gpt_neox")
    predicted = saved_bytes(pieces_of(facts, attention="eager"))
    assert predicted == pytest.approx(saved_by_autograd("gpt_neox", facts, attn_implementation="eager"), rel=0.03)


def test_gpt_neox_by_hand() -> None:
    """18 hidden states of 64 where the intermediate size is 4 times as large; statistics are small."""
    facts = facts_of("gpt_neox", intermediate_size=256)
    row = BATCH * SEQUENCE * 64 * 4
    statistics = BATCH * SEQUENCE * (8 + 8 + 4 * 4)
    assert saved_bytes(pieces_of(facts)) == 18 * row + statistics


def test_kinds_are_read_off_the_shapes() -> None:
    assert BlockKind.of(facts_of("llama")) == BlockKind(rms_norm=True, rotary=True, gated=True)
    assert BlockKind.of(facts_of("gpt2")) == BlockKind(fused_projection=True)
    neox = BlockKind(fused_projection=True, rotary=True, parallel_residual=True, heads_apart=True)
    assert BlockKind.of(facts_of("gpt_neox")) == neox
    assert BlockKind.of(facts_of("opt")) == BlockKind(relu=True)


def test_kinds_of_experts_are_read_off_the_shapes() -> None:
    mixtral = BlockKind(rms_norm=True, rotary=True, gated=True, experts=4, expert_features=48)
    assert BlockKind.of(facts_of("mixtral")) == mixtral
    qwen = replace(mixtral, experts=8, expert_features=32)
    assert BlockKind.of(facts_of("qwen2_moe")) == replace(qwen, shared_features=80, shared_gate=True)
    assert BlockKind.of(facts_of("qwen3_moe")) == replace(qwen, head_norms=True)


def test_a_dense_first_block_does_not_hide_experts() -> None:
    more = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
    config = {"model_type": "glm4_moe", **CONFIGS["llama"], **more, "first_k_dense_replace": 1, "head_dim": 16}
    job = Job.model_validate({"model": {"config": config}, "data": {"sequence_length": SEQUENCE}})
    kind = BlockKind.of(discover(build_model(job), job))
    assert (kind.experts, kind.expert_features, kind.shared_features) == (4, 24, 24)


def test_selective_keeps_outputs_of_matrix_products() -> None:
    """GPT-NeoX: query-key-value 3H, attention H and a statistic a head, its projection H, MLP up I, MLP down H."""
    facts = facts_of("gpt_neox")
    assert kept_bytes(pieces_of(facts)) == BATCH * SEQUENCE * 4 * (6 * 64 + 192 + facts.attention_heads)


def test_backward_peak_trades_activations_for_gradients() -> None:
    pieces = [
        ModuleMemory("first", saved=100, parameters=50),
        ModuleMemory("second", saved=10, working=5, parameters=1),
    ]
    assert backward_peak(pieces, 1) == (100, 51)
    assert backward_peak(pieces[:1], 1) == (100, 50)
    assert backward_peak([pieces[0], ModuleMemory("second", saved=10, working=200)], 1) == (310, 0)
