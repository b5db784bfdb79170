"""CANINE: masks of attention in windows are made in fp32 and added as the least number of the dtype."""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(("canine",), unfit_dtypes={"fp64": "gives a loss that is not finite"})
