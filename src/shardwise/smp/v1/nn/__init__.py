"""`smp.nn`: the distributed modules."""

from shardwise.smp.v1.nn.language_model import DistributedTransformerLMHead
from shardwise.smp.v1.nn.layers import DistributedEmbedding, DistributedLinear, FlashAttentionLayer
from shardwise.smp.v1.nn.norms import FusedLayerNorm, LayerNorm
from shardwise.smp.v1.nn.transformer import (
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
