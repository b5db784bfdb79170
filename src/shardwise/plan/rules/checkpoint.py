"""Rules about the checkpoints of a run."""

from __future__ import annotations

from shardwise.job.axes import Axis, axis_degrees, same_rows_ranks
from shardwise.plan.draft import Draft, placement_order
from shardwise.plan.rules.rule import Rule, idle


def _unscored(d: Draft) -> bool:
    every, evaluations = d.job.checkpoint.every, d.training.evaluate_every
    return d.job.checkpoint.keep_best and (not every or not evaluations or every % evaluations != 0)


def _is_spread_over_hosts(d: Draft) -> bool:
    """Return whether the ranks of one host hold less than the whole state, as long as there are other hosts."""
    if not d.job.checkpoint.memory_every or d.world.hosts == 1:
        return False
    ranks_of_state = d.world.size // axis_degrees(d.job, d.world.size)[Axis.REPLICA]
    is_together = (placement_order(d.parallel.placement_strategy) or "").startswith("D") or ranks_of_state == 1
    is_whole = is_together and d.world.local_size % ranks_of_state == 0
    return not is_whole or d.parallel.expert_parallel_degree > 1


def _keeps_what_is_not_saved(d: Draft) -> bool:
    """Return whether most of the steps that are never removed would not be saved."""
    every, kept = d.job.checkpoint.every, d.job.checkpoint.keep_every
    return bool(every and kept and kept % every and every % kept)


# fmt: off
RULES: tuple[Rule, ...] = (
    *(idle(f"checkpoint-{key.replace('_', '-')}", f"checkpoint.{key}", "no checkpoint is written at intervals",
           lambda d: not d.job.checkpoint.every, "set checkpoint.every, or leave it out")
      for key in ("keep_last", "keep_every", "asynchronous")),
    Rule("checkpoint-keep-multiple", ("checkpoint.keep_every", "checkpoint.every"),
         "what is kept at multiples of keep_every has to be saved there", _keeps_what_is_not_saved,
         fix="set keep_every to a multiple of checkpoint.every"),
    Rule("checkpoint-keep-best", ("checkpoint.keep_best", "checkpoint.every", "training.evaluate_every"),
         "every checkpoint has to have a validation loss", _unscored,
         fix="set training.evaluate_every to a divisor of checkpoint.every"),
    Rule("checkpoint-memory",
         ("checkpoint.memory_every", "parallel.sharded_data_parallel_degree", "parallel.placement_strategy"),
         "each host holds the whole state, so that the others have it when one is lost", _is_spread_over_hosts,
         fix="shard over the ranks of one host, without expert parallelism, and begin the placement with D, or leave "
         "memory_every out",
         because=lambda d: f"the {d.world.local_size} rank(s) of a host hold a part of the state",
         use=lambda d: f"use sharded_data_parallel_degree {max(1, d.world.local_size // same_rows_ranks(d.job))} or a "
         "divisor of it, no expert parallelism and a placement that begins with D, or leave memory_every out"),
    idle("checkpoint-staging", "checkpoint.staging_bytes", "a synchronous checkpoint stages a few blocks only",
         lambda d: not d.job.checkpoint.asynchronous),
)
# fmt: on
