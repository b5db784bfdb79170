"""Attention of plain products: the reference, in the arithmetic of the models' own eager attention."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.kernels.attention.blocks import repeat_key_heads
from shardwise.kernels.attention.call import AttentionCall
from shardwise.kernels.loss import loss_dtype


def eager(call: AttentionCall) -> Tensor:
    """Return [B, h, Q, d] of a call; its scores are in fp32 or wider."""
    wide = loss_dtype(call.query.dtype)
    key, value = repeat_key_heads(call.key, call.query), repeat_key_heads(call.value, call.query)
    scores = (call.query.to(wide) @ key.to(wide).mT) * call.scale
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
    added = call.dense()
    if call.is_causal and (added is None or call.mask is not None):
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(ahead, torch.finfo(wide).min)
    if added is not None:
        scores = scores.masked_fill(~added, torch.finfo(wide).min) if added.dtype == torch.bool else scores + added
    weights = scores.softmax(-1)
    if call.dropout > 0:
        dropout_factors = call.dropout_factors()
        weights = weights * dropout_factors.factors(weights.shape[1], slice(None), slice(None), wide)
    return (weights @ value.to(wide)).to(value.dtype)  # in backward too: products of fp16 leave its range
