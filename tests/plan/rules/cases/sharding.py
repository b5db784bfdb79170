"""Cases of the rules in `plan/rules/sharding.py`."""

from __future__ import annotations

from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CPU4, FACTS, case

CASES = {
    "optimizer-state": case(
        {"parallel": {"shard_optimizer_state": True, "sharded_data_parallel_degree": 2}},
        {"parallel": {"shard_optimizer_state": True, "sharded_data_parallel_degree": 1}},
        "sharded_data_parallel_degree 1",
    ),
    "shard-degree": case(
        {"parallel": {"sharded_data_parallel_degree": 3}},
        {"parallel": {"sharded_data_parallel_degree": 2}},
        "sharded_data_parallel_degree=3: does not divide the 4 data ranks; use 1, 2 or 4",
    ),
}

MORE: list[tuple[str, dict[str, Any], World, ModelFacts]] = [
    ("shard-degree", {"parallel": {"sharded_data_parallel_degree": 8}}, CPU4, FACTS),
]
