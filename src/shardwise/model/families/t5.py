"""T5: each head of a stack's attention has a trained bias for every distance."""

from __future__ import annotations

from shardwise.model.family import Family, FamilyAttention
from shardwise.model.split_rules import COLUMN, ROW, below
from shardwise.model.tensor_split import TensorSplit

ATTENTION = {"q": COLUMN, "k": COLUMN, "v": COLUMN, "o": ROW, "relative_attention_bias": COLUMN}
MLP = {"wi": COLUMN, "wi_0": COLUMN, "wi_1": COLUMN, "wo": ROW, "dropout": TensorSplit("inner")}
STACK = (
    below("block.*.layer.*.SelfAttention", ATTENTION)
    | below("block.*.layer.*.EncDecAttention", ATTENTION)
    | below("block.*.layer.*.DenseReluDense", MLP)
)

FAMILY = Family(
    ("t5",),
    attention=FamilyAttention(
        bias="trained", note="memory grows with the square; of a config or directory, by `task: seq2seq_lm`"
    ),
    tensor_splits=below("encoder", STACK) | below("decoder", STACK),
)
