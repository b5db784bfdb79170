"""HunYuan-VL: one of its four positions numbers the images of a whole microbatch, not those of a row."""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(("hunyuan_vl",), couples_rows=True)
