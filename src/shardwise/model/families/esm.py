"""ESM: hides padding from its embeddings too."""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(("esm",), document_refusal="multiplies its embeddings by its mask")
