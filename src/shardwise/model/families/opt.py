"""OPT: its MLP lies in the block itself, beside the norms."""

from __future__ import annotations

from shardwise.model.facts import BlockTraits
from shardwise.model.family import Family, FamilyAttention
from shardwise.model.split_rules import ROW, SEPARATE_ATTENTION, below
from shardwise.model.tensor_split import TensorSplit

FAMILY = Family(
    ("opt",),
    attention=FamilyAttention(),
    tensor_splits=below("decoder.layers.*.self_attn", SEPARATE_ATTENTION)
    | below("decoder.layers.*", {"fc1": TensorSplit("column", alone=True), "fc2": ROW}),
    block=BlockTraits(relu=True),  # transformers' default; a config may say otherwise
)
