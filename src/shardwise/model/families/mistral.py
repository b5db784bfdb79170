"""Mistral: layers may see a window."""

from __future__ import annotations

from shardwise.model.family import Family, FamilyAttention

FAMILY = Family(("mistral",), attention=FamilyAttention(window=True))
