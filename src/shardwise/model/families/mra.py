"""MRA: attention of several resolutions, which is computed in fp32 whatever the dtype of its layers."""

from __future__ import annotations

from shardwise.model.family import Family

_REASON = "attends in fp32 and gives that to layers of another dtype, which fails"
FAMILY = Family(("mra",), unfit_dtypes={"fp64": _REASON, "bf16": _REASON})
