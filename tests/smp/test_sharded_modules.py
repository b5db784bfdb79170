"""Modules of SMP's version 2: attention that scripts put into models, and how transformed models name their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise.smp.v2 as tsm
from shardwise.errors import ConfigError
from shardwise.smp.v2.nn.attn import FlashGroupedQueryAttention, FlashSelfAttention
from shardwise.smp.v2.nn.huggingface.llama_flashattn import LlamaFlashAttention
from shardwise.smp.v2.tensor_parallel.transformer import MultiheadAttention
from shardwise.smp.v2.utils.module_utils import empty_module_params
from shardwise.testing.world import WorldPool
from tests.smp.sharded_scripts import make_model


def _classes() -> dict[str, Any]:
    try:
        tsm.init({"hybrid_shard_degree": 1})
        with torch.device("meta"):
            model: Any = make_model("mixtral")
        kept = nn.Buffer(torch.arange(3.0))
        model.model.norm.register_buffer("kept", kept)
        model = tsm.transform(model, device="cpu", dtype=torch.bfloat16)
        marked = [name for name, part in model.named_modules() if isinstance(part, MultiheadAttention)]
        norm: Any = empty_module_params(model.model.norm, "cpu")
        return {
            "marked": marked,
            "devices": {str(parameter.device) for parameter in model.lm_head.parameters()},
            "dtypes": {parameter.dtype for parameter in model.parameters()},
            "buffers": norm.kept.tolist(),
            "emptied": str(norm.weight.device),
        }
    finally:
        tsm.state.reset()


def test_models_on_meta_stay_there_and_name_their_attention(world_pool: WorldPool) -> None:
    found = world_pool.run(1, _classes)[0]
    assert found["marked"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert found["devices"] == {"meta"} and found["dtypes"] == {torch.bfloat16}
    assert found["emptied"] == "cpu" and found["buffers"] == [0, 1, 2]


def test_attention_modules_are_attention() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 3, 4, 5, 6)  # [B, 3, heads, S, d]
    output = FlashSelfAttention()(qkv, causal=True)
    q, k, v = qkv.unbind(1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(output, expected)
    heads = torch.cat([q, k, v], 1)  # [B, 3 heads, S, d]
    assert torch.equal(FlashSelfAttention()(heads, causal=True), output)
    turned = FlashSelfAttention()(heads.transpose(1, 2), causal=True, layout="b s h d")
    assert torch.equal(turned.transpose(1, 2), output)
    both = torch.cat([k[:, :2], v[:, :2]], 1).transpose(1, 2)
    packed = FlashGroupedQueryAttention()(q.transpose(1, 2), both)
    with pytest.raises(ConfigError, match=r"3 x heads in dim 1 \(b h s d\), not \(2, 5, 12, 6\)"):
        FlashSelfAttention()(heads.transpose(1, 2))
    grouped = FlashGroupedQueryAttention()(q.transpose(1, 2), (k[:, :2].transpose(1, 2), v[:, :2].transpose(1, 2)))
    assert grouped.shape == (2, 5, 4, 6) and torch.equal(grouped, packed)
    with pytest.raises(ConfigError, match="layout"):
        FlashSelfAttention()(qkv, layout="s b h d")
    model: Any = make_model("llama", torch.float32)
    attention = LlamaFlashAttention(model.config)
    own = model.model.layers[0].self_attn
    attention.load_state_dict(own.state_dict())
    hidden = torch.randn(2, 8, 24)
    places = attention.rotary_emb(hidden, torch.arange(8).unsqueeze(0))
    assert torch.allclose(attention(hidden)[0], own(hidden, places, None)[0], atol=1e-6)
