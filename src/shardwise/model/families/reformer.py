"""Reformer: reversible layers, whose backward calls blocks inside of an autograd function."""

from __future__ import annotations

from shardwise.model.family import Family

FAMILY = Family(
    ("reformer",),
    refusal="computes its blocks again in a backward of its own, in which no rank gathers weights, and outside of "
    "training takes no gradients",
)
