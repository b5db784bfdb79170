"""Liger's fused kernels in place of norms, gated MLPs and rotary positions (kernels/liger.py)."""

from __future__ import annotations

from shardwise.kernels.liger import use_liger
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.plan.plan import Plan


class FusedKernels(Transform):
    """Modules that the facts call fusible, by Liger; below everything that later transforms put around them."""

    name = "fused_kernels"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return plan.job.model.liger

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            use_liger(stage.model, inputs.facts.fusible)
