"""XGLM, FSMT and Kosmos-2: their masks make the least number of a dtype a tensor of fp32."""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(
    ("xglm", "fsmt", "kosmos_2_text_model"),
    keeps_documents_apart=True,
    unfit_dtypes={"fp64": "puts the least number of the dtype into fp32, which fails"},
)
