"""Linear layers in float8 (kernels/float8.py)."""

from __future__ import annotations

from shardwise.kernels.float8 import Float8
from shardwise.kernels.linear import use_float8
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.plan.plan import Plan


class Float8Linears(Transform):
    """The linear layers that the plan names, in the blocks of this rank's stages."""

    name = "float8"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return bool(plan.float8)

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        plan, precision = inputs.plan, inputs.plan.job.precision
        float8 = Float8(precision.fp8, precision.fp8_scaling, plan.gathers_float8)
        for stage in build.stages:
            prefixes = tuple(f"{name}." for name in stage.block_names(inputs.facts))
            names = [name for name in plan.float8 if name.startswith(prefixes)]
            use_float8([stage.model.get_submodule(name) for name in names], float8)
