"""Gemma 3 of text: most layers see a window."""

from __future__ import annotations

from shardwise.model.family import Family, FamilyAttention

FAMILY = Family(("gemma3_text",), attention=FamilyAttention(window=True))
