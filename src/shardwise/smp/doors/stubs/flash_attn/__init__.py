"""Stands for flash_attn where scripts import it: torch's fused attention behind its names."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

__version__ = "0.0"


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    """[B, S, heads, d] -> [B, S, heads, d]."""
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    output = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=grouped
    )
    return output.transpose(1, 2)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """[B, S, 3, heads, d] -> [B, S, heads, d]; arguments as of `flash_attn_func`."""
    query, key, value = qkv.unbind(2)
    return flash_attn_func(query, key, value, *args, **kwargs)
