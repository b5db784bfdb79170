"""Qwen 3: transformers' plan says how it is split."""

from __future__ import annotations

from shardwise.model.family import Family, FamilyAttention

FAMILY = Family(("qwen3",), attention=FamilyAttention())
