"""Degrees of tensor parallelism that share out the heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.errors import LegalityError
from shardwise.model.tensor_split import TensorSplit
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CPU4, FACTS, resolve_case


def test_key_value_heads_are_held_in_copies_where_their_projections_are_apart() -> None:
    job = {"parallel": {"tensor_parallel_degree": 12}}
    world = World(12, "cpu", 12)
    apart = replace(FACTS, tensor_splits={"k": TensorSplit("column", key_value=True)})
    resolve_case(job, world, apart)
    with pytest.raises(LegalityError, match="use 1, 2, 3 or 6"):
        resolve_case(job, world, replace(FACTS, tensor_splits={"qkv": TensorSplit("column")}))
    with pytest.raises(LegalityError, match="use 1, 2, 3, 6 or 12"):
        resolve_case({"parallel": {"tensor_parallel_degree": 4}}, CPU4, apart)
