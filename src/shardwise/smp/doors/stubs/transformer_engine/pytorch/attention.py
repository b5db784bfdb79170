"""The class that scripts name to checkpoint attention apart from experts: that of a transformed model."""

from shardwise.smp.v2.tensor_parallel.transformer import MultiheadAttention

__all__ = ["MultiheadAttention"]
