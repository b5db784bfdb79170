"""`smp.patches`: functions in the place of torch's own."""

from shardwise.smp.patches import checkpoint

__all__ = ["checkpoint"]
