"""Gemma 2: scores are capped, and every other layer sees a window."""

from __future__ import annotations

from shardwise.model.family import Family, FamilyAttention

FAMILY = Family(("gemma2",), attention=FamilyAttention(softcap=True, window=True))
