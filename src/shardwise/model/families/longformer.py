"""Longformer and LED: attention in windows, whose mask is added as the least number of the dtype."""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(("longformer", "led"), unfit_dtypes={"fp64": "gives gradients that are not finite"})
