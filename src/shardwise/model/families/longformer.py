"""Longformer and LED: attention in windows, whose mask is added as the least number of the dtype."""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(("longformer", "led"), fp64_obstacle="gives gradients that are not finite")
