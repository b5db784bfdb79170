"""Expert parallelism: each rank keeps some experts of every layer, whole, and tokens travel to them.

A stack of experts [E, ...] is cut along its first dim; what happens at the call of the module is in
parallel/experts.py. The ranks are the data ranks, seen a second time (`ExpertView`): those that hold the same experts
shard them, or hold copies.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.job.axes import Axis
from shardwise.kernels.experts import SortedExperts
from shardwise.model.experts import NUMBER, ExpertCall, call_of
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, StageBuilder, Transform
from shardwise.parallel.experts import SharedExperts
from shardwise.parallel.tensor_map import ParameterSplit, narrow_parameters
from shardwise.plan.plan import Plan


class ExpertParallelism(Transform):
    """Stacks of experts cut by expert, and their calls with dispatch and combine around them."""

    name = "expert"
    axis = Axis.EXPERT

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return True

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            for name, number in inputs.facts.expert_stacks.items():
                stage.splits |= _share_experts(stage, name, number, inputs)


def _share_experts(stage: StageBuilder, name: str, number: int, inputs: BuildInputs) -> dict[str, ParameterSplit]:
    """Keep this rank's experts of the module `name` (on the meta device); return how its parameters were split."""
    layout, plan = inputs.layout, inputs.plan
    module: Any = stage.model.get_submodule(name)
    call = call_of(module) or ExpertCall.ROUTED
    splits = keep_own_experts(module, name, number, layout.experts.degree, layout.experts.expert)
    same_tokens = plan.degrees[Axis.TENSOR] > 1 and not plan.sequence_parallel
    tensor = layout.group(Axis.TENSOR) if same_tokens else None
    own = SortedExperts(module, module.forward, call)
    module.forward = SharedExperts(name, own, number, layout.experts.levels(), tensor).forward
    return splits


def keep_own_experts(stack: nn.Module, name: str, number: int, degree: int, index: int) -> dict[str, ParameterSplit]:
    """Narrow the stack `name` of `number` experts (on the meta device) to part `index` of `degree`.

    Returns:
        How each parameter was split, by its name in the model.
    """
    splits = {
        leaf: ParameterSplit(tuple(parameter.shape), 0, (len(parameter),), degree, index, axis=Axis.EXPERT)
        for leaf, parameter in stack.named_parameters()
    }
    narrow_parameters(stack, splits)
    setattr(stack, NUMBER, number // degree)
    return {f"{name}.{leaf}": split for leaf, split in splits.items()}
