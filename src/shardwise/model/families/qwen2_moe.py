"""Qwen 1.5 and 2 with experts; transformers' plan leaves the shared expert whole."""

from __future__ import annotations

from shardwise.model.family import Family
from shardwise.model.split_rules import COLUMN, GATED_MLP, ROW, below
from shardwise.model.tensor_split import TensorSplit

FAMILY = Family(
    ("qwen2_moe",),
    tensor_splits=below("layers.*.self_attn", {"q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "o_proj": ROW})
    | below("layers.*.mlp", {**GATED_MLP, "experts": TensorSplit("experts")})
    | below("layers.*.mlp.shared_expert", GATED_MLP),
)
