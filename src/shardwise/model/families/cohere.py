"""Command R: attention and MLP read the same hidden states."""

from __future__ import annotations

from shardwise.model.facts import BlockTraits
from shardwise.model.family import Family

FAMILY = Family(("cohere",), block=BlockTraits(parallel_residual=True))
