"""Qwen 3 with experts, stacked as transformers' plan splits them."""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(("qwen3_moe",), experts=True)
