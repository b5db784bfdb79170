"""Rules about sharded parameters, gradients and optimizer state."""

from __future__ import annotations

from shardwise.plan.rules.rule import Rule
from shardwise.words import divisors, one_of

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("optimizer-state", ("parallel.shard_optimizer_state", "parallel.sharded_data_parallel_degree"),
         "sharded parameters have sharded optimizer state already",
         lambda d: d.parallel.shard_optimizer_state and (d.parallel.sharded_data_parallel_degree or 1) > 1,
         fix="use shard_optimizer_state false, or sharded_data_parallel_degree 1"),
    Rule("shard-degree", ("parallel.sharded_data_parallel_degree",), "has to divide the number of data ranks",
         lambda d: d.data_axis % d.sharded,
         fix="use a divisor of the number of data ranks",
         because=lambda d: f"does not divide the {d.data_axis} data ranks",
         use=lambda d: f"use {one_of(divisors(d.data_axis))}"),
)
# fmt: on
