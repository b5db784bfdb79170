"""Gradients of weights apart from those of activations, and later, for schedules that fill idle time with them."""

from __future__ import annotations

from shardwise.job.axes import Axis
from shardwise.kernels.linear import defer_weight_gradients
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.plan.plan import Plan


class DeferredWeightGradients(Transform):
    """Backward of a stage's linear layers in two halves (Zero Bubble, arXiv 2401.10241, section 2).

    Nobody waits for the gradient of the first stage's input: its weight gradients come with the rest, and what they
    need does not have to wait.
    """

    name = "weight_gradients"
    axis = Axis.PIPELINE

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return plan.splits_backward

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            is_first = stage.boundary is not None and stage.boundary.is_first
            stage.weight_gradients = defer_weight_gradients([] if is_first else stage.blocks(inputs.facts))
