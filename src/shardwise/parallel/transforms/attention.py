"""Attention of models of transformers by the kernels of kernels/attention/dispatch.py."""

from __future__ import annotations

from shardwise.kernels.attention.interface import use_attention_kernel
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.plan.plan import Plan


class AttentionKernels(Transform):
    """The plan's attention kernel in the place of transformers' own."""

    name = "attention"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return bool(plan.attention)

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            use_attention_kernel(stage.model, inputs.plan.attention)
