"""CodeGen: its fused projection is laid out for four ranks."""

from __future__ import annotations

from typing import Any

from shardwise.model.facts import BlockTraits
from shardwise.model.family import Family


def _tensor_refusal(config: Any) -> str:
    """Refuse transformers' plan, which 5.24 has: it is right for degrees that divide 4 alone."""
    return "codegen lays out queries, values and keys in four parts, which other degrees would cut across"


FAMILY = Family(
    ("codegen",),
    tensor_refusal=_tensor_refusal,
    block=BlockTraits(parallel_residual=True, heads_apart=True, projection_parts=4),
)
