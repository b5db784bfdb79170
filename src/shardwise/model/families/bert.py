"""BERT and RoBERTa, whose blocks have the same names."""

from __future__ import annotations

from shardwise.model.family import Family, FamilyAttention
from shardwise.model.split_rules import COLUMN, ROW, below

FAMILY = Family(
    ("bert", "roberta"),
    attention=FamilyAttention(),
    tensor_splits=below("encoder.layer.*.attention.self", {"query": COLUMN, "key": COLUMN, "value": COLUMN})
    | below("encoder.layer.*", {"attention.output.dense": ROW, "intermediate.dense": COLUMN, "output.dense": ROW}),
)
