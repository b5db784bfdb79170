"""`smp.patches`: functions in the place of torch's own."""

from shardwise.smp.v1.patches import checkpoint

__all__ = ["checkpoint"]
