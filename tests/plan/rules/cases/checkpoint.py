"""Cases of the rules in `plan/rules/checkpoint.py`."""

from __future__ import annotations

from shardwise.plan.draft import World
from tests.plan.rules.jobs import case

CASES = {
    "checkpoint-keep-last": case(
        {"checkpoint": {"keep_last": 3}}, {"checkpoint": {"keep_last": 3, "every": 5}}, "set checkpoint.every"
    ),
    "checkpoint-keep-every": case(
        {"checkpoint": {"keep_every": 10}}, {"checkpoint": {"keep_every": 10, "every": 5}}, "keep_every=10"
    ),
    "checkpoint-keep-multiple": case(
        {"checkpoint": {"keep_every": 250, "every": 100}},
        {"checkpoint": {"keep_every": 300, "every": 100}},
        "a multiple of checkpoint.every",
    ),
    "checkpoint-asynchronous": case(
        {"checkpoint": {"asynchronous": False}}, {"checkpoint": {"asynchronous": False, "every": 5}}, "at intervals"
    ),
    "checkpoint-keep-best": case(
        {"checkpoint": {"keep_best": True, "every": 5}, "training": {"evaluate_every": 2}},
        {"checkpoint": {"keep_best": True, "every": 4}, "training": {"evaluate_every": 2}},
        "training.evaluate_every to a divisor of checkpoint.every",
    ),
    "checkpoint-memory": case(
        {"checkpoint": {"memory_every": 1}},
        {"checkpoint": {"memory_every": 1}, "parallel": {"sharded_data_parallel_degree": 2}},
        "use sharded_data_parallel_degree 2",
        World(4, "cpu", 2, hosts=2),
    ),
    "checkpoint-staging": case(
        {"checkpoint": {"staging_bytes": 1 << 24, "asynchronous": False, "every": 5}},
        {"checkpoint": {"staging_bytes": 1 << 24, "every": 5}},
        "staging_bytes=16777216",
    ),
}
