"""Attention by torch's FlexAttention, compiled for a call's mask, bias and soft cap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise._torch_compat import accelerator
from shardwise.kernels.attention.blocks import repeat_key_heads
from shardwise.kernels.attention.call import AttentionCall


def flex(call: AttentionCall) -> Tensor:
    """Return [B, h, Q, d] of a call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    bias, cap, mask = call.bias, call.softcap, call.mask

    def score(value: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            value = cap * (value / cap).tanh()
        if bias is None:
            return value
        at = [index if size > 1 else 0 for index, size in zip((b, h, q, k), bias.shape, strict=True)]
        return value + bias[at[0], at[1], at[2], at[3]]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if mask is None:
            return q >= k
        result = mask.function(b, h, mask.rows[q], mask.columns[k])
        return result

    hides = mask is not None or call.causal
    queries, keys = call.query.shape[2], call.key.shape[2]
    batch = None if mask is None else call.query.shape[0]
    hidden = create_block_mask(visible, batch, None, queries, keys, call.query.device.type) if hides else None
    attend: Any = torch.compile(flex_attention) if accelerator.on_accelerator(call.query) else flex_attention
    key, value = repeat_key_heads(call.key, call.query), repeat_key_heads(call.value, call.query)
    bent = score if cap is not None or bias is not None else None
    output: Tensor = attend(call.query, key, value, bent, hidden, scale=call.scale)
    return output
