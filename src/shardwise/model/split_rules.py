"""Rules of tensor parallelism that several families share, and the words in which a family's file writes its own."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.model.tensor_split import TensorSplit

COLUMN = TensorSplit("column")
ROW = TensorSplit("row")


def below(parent: str, rules: Mapping[str, TensorSplit]) -> dict[str, TensorSplit]:
    """Return `rules` of modules that are children of `parent`."""
    return {f"{parent}.{name}": split for name, split in rules.items()}


SEPARATE_ATTENTION = {"q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "out_proj": ROW}
GATED_MLP = {"gate_proj": COLUMN, "up_proj": COLUMN, "down_proj": ROW}
FUSED_PROJECTION = "query_key_value"
# BLOOM's and Falcon's blocks: one projection of [heads, (query, key, value), head size].
INTERLEAVED_BLOCK = below("h.*.self_attention", {FUSED_PROJECTION: COLUMN, "dense": ROW}) | below(
    "h.*.mlp", {"dense_h_to_4h": COLUMN, "dense_4h_to_h": ROW}
)
