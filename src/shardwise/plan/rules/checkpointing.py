"""Rules about activation checkpointing."""

from __future__ import annotations

from shardwise.plan.draft import Draft, group_size
from shardwise.plan.rules.rule import Rule, idle

CHECKPOINTING = "memory.activation_checkpointing"
STRATEGY = "memory.checkpoint_strategy"


def no_checkpointing(d: Draft) -> bool:
    """Return whether no activation is checkpointed."""
    return d.memory.activation_checkpointing == "none"


def checkpoints_groups(d: Draft) -> bool:
    """Return whether several blocks are checkpointed as one."""
    return d.memory.checkpoint_strategy != "each"


def _nameless_strategy(d: Draft) -> bool:
    name = d.memory.checkpoint_strategy
    return name not in ("each", "contiguous") and group_size(name) is None


def _blocks(d: Draft) -> int:
    return max(1, len(d.facts.blocks))


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("checkpointing-blocks", (CHECKPOINTING,), "repeated blocks are checkpointed, and this model has none",
         lambda d: not no_checkpointing(d) and not d.facts.blocks,
         fix="use none"),
    idle("checkpoint-every", "memory.checkpoint_every", "no activation is checkpointed", no_checkpointing,
          f"set {CHECKPOINTING} to full or selective"),
    idle("checkpoint-strategy", STRATEGY, "no activation is checkpointed", no_checkpointing,
          f"set {CHECKPOINTING} to full or selective"),
    Rule("keep-expert-rows", ("memory.keep_expert_rows", CHECKPOINTING, "parallel.expert_parallel_degree"),
         "rows are kept of experts that ranks share, for the recomputation of checkpointed blocks",
         lambda d: d.memory.keep_expert_rows
         and (no_checkpointing(d) or d.parallel.expert_parallel_degree == 1),
         fix=f"leave it out, or set {CHECKPOINTING} to full and expert_parallel_degree to 2 or more"),
    Rule("checkpoint-strategy-name", (STRATEGY,), "has to be each, contiguous or group_N", _nameless_strategy,
         fix="use each, contiguous or group_N with N from 1, e.g. group_2"),
    Rule("checkpoint-grouping", ("memory.checkpoint_every", STRATEGY),
         "either every n-th block is checkpointed or groups of blocks are",
         lambda d: d.memory.checkpoint_every > 1 and checkpoints_groups(d),
         fix="use checkpoint_every 1 or checkpoint_strategy each"),
    Rule("checkpoint-every-blocks", ("memory.checkpoint_every",), "n is at most the number of blocks",
         lambda d: d.memory.checkpoint_every > _blocks(d),
         fix="use a smaller n",
         because=lambda d: f"more than the model's {_blocks(d)} blocks",
         use=lambda d: f"use at most {_blocks(d)}"),
    Rule("checkpoint-group-blocks", (STRATEGY,), "N is at most the number of blocks",
         lambda d: (group_size(d.memory.checkpoint_strategy) or 1) > _blocks(d),
         fix="use a smaller N",
         because=lambda d: f"N is more than the model's {_blocks(d)} blocks",
         use=lambda d: f"use contiguous, or group_N with N of at most {_blocks(d)}"),
    Rule("checkpoint-arguments", (STRATEGY,),
         "blocks checkpointed together have to be called with the same arguments, and this model's are not",
         lambda d: checkpoints_groups(d) and not d.facts.blocks_share_arguments,
         fix="use each"),
)
# fmt: on
