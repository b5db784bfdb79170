"""GLM 4 with experts, stacked as transformers' plan splits them."""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(("glm4_moe",), experts=True)
