"""Mixtral: Mistral with experts, stacked as transformers' plan splits them."""

from __future__ import annotations

from shardwise.model.family import Family, FamilyAttention

FAMILY = Family(("mixtral",), attention=FamilyAttention(window=True))
