"""GPT-NeoX and Pythia: attention and MLP read the same hidden states."""

from __future__ import annotations

from shardwise.model.facts import BlockTraits
from shardwise.model.family import Family, FamilyAttention

FAMILY = Family(("gpt_neox",), attention=FamilyAttention(), block=BlockTraits(parallel_residual=True, heads_apart=True))
