"""GPT-Neo: its attention makes its own products, and every other layer sees a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from shardwise.model.family import Family, FamilyAttention
from shardwise.model.interface_attention import LOCAL_WINDOW, InterfaceAttention
from shardwise.model.split_rules import COLUMN, ROW, SEPARATE_ATTENTION, below


class GPTNeoInterfaceAttention(GPTNeoSelfAttention, InterfaceAttention):
    """GPT-Neo's attention through the interface: scores are not scaled, and the mask does not know the window."""

    scores_dtype = torch.float32
    always_causal = True

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        window = {LOCAL_WINDOW: self.config.window_size} if self.attention_type == "local" else {}
        return self.attend(query, key, value, attention_mask, 1.0, **window).transpose(1, 2), None


FAMILY = Family(
    ("gpt_neo",),
    attention=FamilyAttention(
        window=True,
        note="own products in transformers; every other layer is local",
        classes={GPTNeoSelfAttention: GPTNeoInterfaceAttention},
        eager_only=True,
        fp32_scores=True,
    ),
    tensor_splits=below("h.*.attn.attention", SEPARATE_ATTENTION) | below("h.*.mlp", {"c_fc": COLUMN, "c_proj": ROW}),
)
