"""Rules about what is kept in the host's memory."""

from __future__ import annotations

from shardwise.plan.rules.checkpointing import CHECKPOINTING, no_checkpointing
from shardwise.plan.rules.rule import Rule

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("offload-parameters", ("memory.offload_parameters", "parallel.shard_optimizer_state"),
         "offload keeps shards of parameters on the host, and shard_optimizer_state leaves parameters whole",
         lambda d: d.memory.offload_parameters and d.parallel.shard_optimizer_state,
         fix="use sharded_data_parallel_degree instead of shard_optimizer_state"),
    Rule("offload-activations", ("memory.offload_activations", CHECKPOINTING),
         "what is offloaded are the kept activations of checkpointed blocks",
         lambda d: d.memory.offload_activations and no_checkpointing(d),
         fix=f"set {CHECKPOINTING} to full"),
)
# fmt: on
