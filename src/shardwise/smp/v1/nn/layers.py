"""`smp.nn`'s single layers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.smp.alibi import with_alibi


class DistributedLinear(nn.Linear):
    """`nn.Linear`; by itself it is whole on every tensor rank, and only inside of a transformer is it split."""


class DistributedEmbedding(nn.Embedding):
    """`nn.Embedding`, whole on every tensor rank.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as of torch's.
        initializer_range: standard deviation of fresh weights.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ) -> None:
        self.initializer_range = initializer_range
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight
        )

    def reset_parameters(self) -> None:
        """Normal weights, zero for padding."""
        nn.init.normal_(self.weight, std=self.initializer_range)
        self._fill_padding_idx_with_zero()


class FlashAttentionLayer(nn.Module):
    """Fused attention on packed projections.

    Args:
        attention_dropout_prob: of probabilities, in training.
        attention_head_size: accepted; the input's shape says it.
        scale_attention_scores: divide scores by sqrt(head size), unless `scale` is given.
        scale_attn_by_layer_idx, layer_idx: divide them by layer_idx + 1 too.
        scale: the factor of scores.
        triton_flash_attention: accepted; torch chooses its kernel.
        use_alibi: scores fall with the distance; see `alibi.py`.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        self.alibi = use_alibi
        self.p, self.scale = attention_dropout_prob, 1.0 if scale is None and not scale_attention_scores else scale
        self.by_layer = (layer_idx or 0) + 1 if scale_attn_by_layer_idx else 1

    def forward(self, qkv: Tensor, attn_mask: Any = None, causal: bool = False) -> Tensor:
        """[B, S, 3, heads, D] -> [B, heads, S, D]; `attn_mask` is additive."""
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scale = (query.shape[-1] ** -0.5 if self.scale is None else self.scale) / self.by_layer
        dropout = self.p if self.training else 0.0
        if self.alibi:
            attn_mask, causal = with_alibi(query, attn_mask, causal), False
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout, causal, scale=scale)
