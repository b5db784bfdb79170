"""SMP's FlashAttention modules, on torch's fused attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ConfigError
from shardwise.smp.alibi import with_alibi

LAYOUTS = ("b h s d", "b s h d")


class FlashSelfAttention(nn.Module):
    """Attention of packed or separate queries, keys and values.

    Args:
        attention_dropout_prob: probability that an attention weight is dropped in training.
        scale: of the scores; unset: 1/sqrt(head size).
        triton_flash_attention: accepted; the kernel is torch's.
        use_alibi: scores fall with the distance; see `smp/v1/nn/alibi.py`.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.0,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        self.dropout, self.scale, self.alibi = attention_dropout_prob, scale, use_alibi

    def forward(
        self, qkv: Any, attn_mask: Tensor | None = None, causal: bool = False,
        cast_dtype: torch.dtype | None = None, layout: str = "b h s d",
    ) -> Tensor:  # fmt: skip
        """[B, heads, S, d] (or [B, S, heads, d], as `layout` says) of a tuple of three, or of one tensor with queries,
        keys and values one behind the other where heads are ([B, S, 3 heads, d] in "b s h d"), or in a dim of 3 there.

        Raises:
            ConfigError: an unknown layout.
        """
        _check(layout)
        if isinstance(qkv, Tensor):
            qkv = _unpacked(qkv, 3, layout)
        query, key, value = qkv
        return _attend(query, key, value, self, attn_mask, causal, cast_dtype, layout)


class FlashGroupedQueryAttention(nn.Module):
    """Attention in which several query heads share a key and a value head; arguments as of FlashSelfAttention."""

    def __init__(self, attention_dropout_prob: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.dropout, self.scale, self.alibi = attention_dropout_prob, scale, False

    def forward(
        self, q: Tensor, kv: Any, causal: bool = False, cast_dtype: torch.dtype | None = None,
        layout: str = "b s h d",
    ) -> Tensor:  # fmt: skip
        """As FlashSelfAttention's, of queries and of a tuple of keys and values, or of one tensor of both."""
        _check(layout)
        key, value = _unpacked(kv, 2, layout) if isinstance(kv, Tensor) else kv
        return _attend(q, key, value, self, None, causal, cast_dtype, layout)


def _check(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(f"layout={layout!r} must be one of {LAYOUTS}")


def _unpacked(packed: Tensor, parts: int, layout: str) -> tuple[Tensor, ...]:
    """Its parts: [B, parts x heads, S, d] by heads, or [B, parts, heads, S, d]; with heads behind S in "b s h d"."""
    heads_dim = LAYOUTS.index(layout) + 1
    if packed.dim() == 4 and packed.shape[heads_dim] % parts == 0:
        return packed.chunk(parts, heads_dim)
    if packed.dim() == 5 and packed.shape[heads_dim] == parts:
        return packed.unbind(heads_dim)
    shape = tuple(packed.shape)
    raise ConfigError(
        f"a tensor of {parts} packed parts has {parts} x heads in dim {heads_dim} ({layout}), not {shape}"
    )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, module: Any, mask: Tensor | None, causal: bool,
    cast_dtype: torch.dtype | None, layout: str,
) -> Tensor:  # fmt: skip
    dtype, turned = query.dtype, layout == LAYOUTS[1]
    q, k, v = ((states.transpose(1, 2) if turned else states).to(cast_dtype or dtype) for states in (query, key, value))
    if module.alibi:
        mask, causal = with_alibi(q, mask, causal), False
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=module.dropout if module.training else 0.0, is_causal=causal,
        scale=module.scale, enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return (output.transpose(1, 2) if turned else output).to(dtype)
