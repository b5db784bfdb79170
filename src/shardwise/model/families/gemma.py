"""Gemma: transformers' plan says how it is split."""

from __future__ import annotations

from shardwise.model.family import Family, FamilyAttention

FAMILY = Family(("gemma",), attention=FamilyAttention())
