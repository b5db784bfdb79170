"""Shapes of what crosses stage boundaries, or what towers return, for models of which that is not [B, S, H] alone."""

from __future__ import annotations

from shardwise.job.axes import Axis
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.parallel.stage_boundary import BoundaryShapes
from shardwise.plan.plan import Plan


class BoundaryShapesOfStages(Transform):
    """A copy of the model as it is here, to ask later what blocks hand on and towers return for inputs of some form."""

    name = "boundary_shapes"
    axis = Axis.PIPELINE

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return (facts.stages.has_flat_boundaries or bool(facts.stages.towers)) and not facts.stages.traced

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        build.boundary_shapes = BoundaryShapes(build.stages[0].model, inputs.facts, inputs.plan)
