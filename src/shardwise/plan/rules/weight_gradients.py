"""Rules about gradients of weights that are put off, to fill a pipeline's bubble."""

from __future__ import annotations

from shardwise.plan.draft import SPLIT_SCHEDULES
from shardwise.plan.rules.rule import Rule
from shardwise.plan.rules.stages import one_stage

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("zero-bubble-compile", ("parallel.pipeline", "model.compile"),
         "a compiled block takes all its gradients at once",
         lambda d: not one_stage(d) and d.parallel.pipeline in SPLIT_SCHEDULES and d.model.compile,
         fix="use model.compile false, or pipeline interleaved"),
)
# fmt: on
