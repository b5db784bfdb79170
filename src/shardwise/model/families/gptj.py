"""GPT-J: up to transformers 5.23 its attention makes its own products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.gptj.modeling_gptj import GPTJAttention

from shardwise.model.facts import BlockTraits
from shardwise.model.family import Family, FamilyAttention
from shardwise.model.interface_attention import InterfaceAttention
from shardwise.model.split_rules import COLUMN, ROW, SEPARATE_ATTENTION, below

MAKES_PRODUCTS = hasattr(GPTJAttention, "_attn")  # from transformers 5.24 on it calls the interface


class GPTJInterfaceAttention(GPTJAttention, InterfaceAttention):
    """GPT-J's attention through the interface."""

    scores_dtype = torch.float32

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        divisor: Any = self.scale_attn
        return self.attend(query, key, value, attention_mask, 1 / divisor).transpose(1, 2), None


FAMILY = Family(
    ("gptj",),
    attention=FamilyAttention(
        note="own products in transformers up to 5.23",
        classes={GPTJAttention: GPTJInterfaceAttention} if MAKES_PRODUCTS else {},
        eager_only=MAKES_PRODUCTS,
        fp32_scores=True,
    ),
    tensor_splits=below("h.*.attn", SEPARATE_ATTENTION) | below("h.*.mlp", {"fc_in": COLUMN, "fc_out": ROW}),
    block=BlockTraits(parallel_residual=True, heads_apart=True),
)
