"""dots.llm1, with experts, stacked as transformers' plan splits them."""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(("dots1",), experts=True)
