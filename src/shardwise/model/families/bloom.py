"""BLOOM: its attention makes its own products, with ALiBi's bias on keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add

from shardwise.model.family import Family, FamilyAttention
from shardwise.model.interface_attention import InterfaceAttention
from shardwise.model.split_rules import INTERLEAVED_BLOCK


class BloomInterfaceAttention(BloomAttention, InterfaceAttention):
    """BLOOM's attention through the interface."""

    is_causal = True
    softmax_dtype = torch.float32

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return attention with the residual added, [B, S, H] -> [B, S, H]; `alibi` is [B*h, 1, S]."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        bias = alibi.view(query.shape[0], self.num_heads, 1, -1)
        output = self.attend(query, key, value, attention_mask, self.inv_norm_factor, key_bias=bias)
        output = self.dense(output.flatten(2))
        return dropout_add(output, residual, self.hidden_dropout, self.training), None


def _tensor_refusal(config: Any) -> str:
    """Refuse products of slices, which are no module's forward."""
    sliced = config.slow_but_exact and config.pretraining_tp > 1
    return "slow_but_exact of bloom adds up slices of whole weights" if sliced else ""


FAMILY = Family(
    ("bloom",),
    attention=FamilyAttention(
        bias="keys",
        note="own products in transformers; ALiBi",
        classes={BloomAttention: BloomInterfaceAttention},
        eager_only=True,
        key_bias_method="build_alibi_tensor",
    ),
    tensor_splits=INTERLEAVED_BLOCK,
    per_head_arguments=("alibi",),
    tensor_refusal=_tensor_refusal,
)
