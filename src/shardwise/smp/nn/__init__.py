"""`smp.nn`: the distributed modules."""

from shardwise.smp.nn.language_model import DistributedTransformerLMHead
from shardwise.smp.nn.layers import DistributedEmbedding, DistributedLinear, FlashAttentionLayer
from shardwise.smp.nn.norms import FusedLayerNorm, LayerNorm
from shardwise.smp.nn.transformer import (
    DistributedAttentionLayer,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerOutputLayer,
)

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "LayerNorm",
]
