"""GPT-2: one fused projection of queries, keys and values, held transposed."""

from __future__ import annotations

from shardwise.model.family import Family, FamilyAttention
from shardwise.model.split_rules import COLUMN, ROW, below
from shardwise.model.tensor_split import TensorSplit

FAMILY = Family(
    ("gpt2",),
    attention=FamilyAttention(),
    tensor_splits=below("h.*.attn", {"c_attn": TensorSplit("column", sections=3), "c_proj": ROW})
    | below("h.*.mlp", {"c_fc": COLUMN, "c_proj": ROW}),
)
