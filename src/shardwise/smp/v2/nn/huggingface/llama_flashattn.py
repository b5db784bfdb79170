"""Llama's attention on torch's fused kernel, for scripts that put it into models of older transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from shardwise.errors import ConfigError
from shardwise.smp.v2.nn.attn import FlashGroupedQueryAttention


class LlamaFlashAttention(nn.Module):
    """`LlamaAttention` of a `LlamaConfig`, causal, without a cache."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.heads = config, config.num_attention_heads
        self.kv_heads = config.num_key_value_heads or self.heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        bias = bool(getattr(config, "attention_bias", False))
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.attention = FlashGroupedQueryAttention(getattr(config, "attention_dropout", 0.0))
        self.pretraining_tp = 1

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_value: Any = None, output_attentions: bool = False, use_cache: bool = False,
    ) -> tuple[Tensor, None, None]:  # fmt: skip
        """[B, S, H] -> ([B, S, H], no weights, no cache); `attention_mask` is taken to be the causal one.

        Raises:
            ConfigError: weights or a cache are asked for.
        """
        if output_attentions or use_cache or past_key_value is not None:
            raise ConfigError("LlamaFlashAttention keeps no weights and no cache; use the model's own attention")
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *self.rotary_emb(value, position_ids))
        output = self.attention(query, (key, value), causal=True, layout="b h s d")
        return self.o_proj(output.transpose(1, 2).flatten(2)), None, None
