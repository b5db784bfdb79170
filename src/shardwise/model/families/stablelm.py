"""StableLM: rotary positions take a part of each head."""

from __future__ import annotations

from shardwise.model.facts import BlockTraits
from shardwise.model.family import Family

FAMILY = Family(("stablelm",), block=BlockTraits(heads_apart=True))
