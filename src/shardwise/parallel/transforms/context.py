"""Context parallelism: sequences split over ranks, attention over all of them (parallel/context.py)."""

from __future__ import annotations

from shardwise.job.axes import Axis
from shardwise.model.facts import ModelFacts
from shardwise.model.position_rule import PositionRule
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.parallel.context import ContextParallel
from shardwise.parallel.split_blocks import split_blocks
from shardwise.plan.plan import Plan


class ContextParallelism(Transform):
    """Attention and masks that reach the other ranks' rows; microbatches are split when they run."""

    name = "context"
    axis = Axis.CONTEXT

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return True

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            rule = PositionRule(inputs.facts.padding_position)
            forward = inputs.facts.split_forward
            heads_whole = bool(inputs.facts.heads_whole)
            context = ContextParallel(stage.model, inputs.plan, inputs.layout, rule, heads_whole, forward)
            if forward is not None:
                split_blocks(stage.model, forward)
            build.context = build.context or context
