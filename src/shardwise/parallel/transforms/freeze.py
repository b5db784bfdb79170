"""Frozen parameters: no gradient, no optimizer state, no reduction."""

from __future__ import annotations

from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.plan.plan import Plan


class FrozenParameters(Transform):
    """Parameters that the facts call frozen, without gradients; FSDP2 reads that when it shards them."""

    name = "freeze"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return bool(facts.frozen)

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            for name, parameter in stage.model.named_parameters():
                parameter.requires_grad_(name not in inputs.facts.frozen and parameter.requires_grad)
