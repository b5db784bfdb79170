"""Rules about pipeline stages that are cut from a traced forward."""

from __future__ import annotations

from shardwise.plan.draft import SPLIT_SCHEDULES, changed
from shardwise.plan.rules.rule import Rule
from shardwise.plan.rules.stages import DEGREE, one_stage

BLOCK_KEYS = ("memory.activation_checkpointing", "model.compile", "precision.fp8")

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("traced-modules", (DEGREE, *BLOCK_KEYS),
         "stages that are cut from a traced forward have operators, and no blocks that something could be done to",
         lambda d: not one_stage(d) and d.facts.stages.traced and changed(d.job, *BLOCK_KEYS),
         fix="use checkpointing none, compile false and fp8 none, or pipeline_parallel_degree 1"),
    Rule("traced-schedule", (DEGREE, "parallel.pipeline"),
         "in a traced forward the gradients of weights cannot be put off",
         lambda d: not one_stage(d) and d.facts.stages.traced and d.parallel.pipeline in SPLIT_SCHEDULES,
         fix="use pipeline interleaved or simple"),
)
# fmt: on
