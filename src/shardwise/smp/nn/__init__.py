"""`smp.nn`: the distributed modules."""

from shardwise.smp.nn.norms import FusedLayerNorm, LayerNorm

__all__ = ["FusedLayerNorm", "LayerNorm"]
