"""A rank's stages of the model while `parallelize` builds them, and the protocol of a transform.

A `ModelBuilder` holds one `StageBuilder` for each virtual stage of this rank (one for the whole model without a
pipeline). Transforms change the stages' modules in place and hand on to later ones through the builders' fields.
`ModelBuilder.finish` does what needs all stages: tied parameters, the tensor map, the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise._torch_compat.autograd import accumulate_grad_hooks
from shardwise._torch_compat.tracing import is_fake
from shardwise.job.axes import Axis, data_axes
from shardwise.kernels.linear import WeightGradients
from shardwise.kernels.loss import VocabularyShard
from shardwise.model.copies import deep_copy
from shardwise.model.facts import ModelFacts
from shardwise.model.gradient_hooks import find_accumulate_grad_hooks, find_gradient_hooks
from shardwise.model.user_state import mentions, user_namespaces
from shardwise.parallel.activation_offload import ActivationOffload
from shardwise.parallel.context import ContextParallel
from shardwise.parallel.deferred_head import DeferredHead
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ModelPart, ParallelModel
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.regions import RegionBoundary
from shardwise.parallel.routers import ExpertRouters
from shardwise.parallel.running_statistics import RunningStatistics
from shardwise.parallel.shared_gradients import partial_parameters
from shardwise.parallel.stage_boundary import BoundaryShapes, StageBoundary
from shardwise.parallel.stage_writes import StageWrites
from shardwise.parallel.tensor_map import ParameterSplit, TensorMap
from shardwise.parallel.unit_use import UnitUse
from shardwise.plan.plan import Plan
from shardwise.planner.formulas.schedule import tied_across

Allocation = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class BuildInputs:
    """Inputs that every transform may read.

    Attributes:
        plan: what will run.
        layout: where this rank stands.
        facts: the structure of the unmodified model.
        device: where this rank computes.
        allocation: surrounds what gives parameters and buffers their storage.
    """

    plan: Plan
    layout: Layout
    facts: ModelFacts
    device: torch.device
    allocation: Allocation


@dataclass
class StageBuilder:
    """One virtual stage on this rank, or the whole model, while transforms work on it.

    Attributes:
        model: the unmodified model, changed in place from transform to transform.
        number: of the stage; None without a pipeline.
        boundary: inputs and outputs of the stage; set by `stages` or `traced_stages`.
        region_boundary: how activations enter and leave split modules; set by `tensor`.
        splits: how `tensor` split parameters, by name.
        vocabulary: this rank's rows of embeddings and head, where `tensor` split them.
        head: the output projection that the loss runs; set by `loss`.
        weight_gradients: those that backward leaves for later; set by `weight_gradients`.
        offload: what moves checkpointed activations to the host; set by `offload`.
        fsdp_modules: FSDP2's modules, the root first; set by `sharding`, shared by stages under one root.
    """

    model: nn.Module
    number: int | None = None
    boundary: StageBoundary | None = None
    region_boundary: RegionBoundary | None = None
    splits: dict[str, ParameterSplit] = field(default_factory=dict)
    vocabulary: VocabularyShard | None = None
    head: DeferredHead | None = None
    weight_gradients: WeightGradients | None = None
    offload: ActivationOffload | None = None
    fsdp_modules: list[FSDPModule] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        """True where the model's output is made."""
        return self.boundary is None or self.boundary.is_last

    def holds(self, name: str) -> bool:
        """Return True if the module `name` of the unmodified model is on this stage."""
        return self.boundary is None or name not in self.boundary.absent

    def block_names(self, facts: ModelFacts) -> list[str]:
        """Return the names of this stage's blocks, in order; none where the forward is traced: it calls no module."""
        return [block.name for block in facts.blocks if self.holds(block.name) and not facts.stages.traced]

    def blocks(self, facts: ModelFacts) -> list[nn.Module]:
        """Return this stage's blocks, in order."""
        return [self.model.get_submodule(name) for name in self.block_names(facts)]

    def unit_groups(self, inputs: BuildInputs) -> list[list[nn.Module]]:
        """Return those of `block_groups` that are units of sharding; the parameters of the others are the root's."""
        of_units = [self.model.get_submodule(name) for name in inputs.facts.unit_blocks if self.holds(name)]
        return [group for group in self.block_groups(inputs) if all(block in of_units for block in group)]

    def block_groups(self, inputs: BuildInputs) -> list[list[nn.Module]]:
        """Return this stage's blocks in groups that are checkpointed and gathered together."""
        return group_blocks(self.blocks(inputs.facts), inputs.plan.job.memory.checkpoint_strategy)


def group_blocks(blocks: list[nn.Module], strategy: str) -> list[list[nn.Module]]:
    """Cut `blocks` into the groups of SMP's `strategy`: `each`, `contiguous` or `group_N`."""
    if strategy == "each":
        size = 1
    elif strategy == "contiguous":
        size = len(blocks)
    else:
        size = int(strategy.removeprefix("group_"))
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


class SharedRoot(nn.Module):
    """Stages of one rank under one root, which owns the parameters that several of them hold.

    No ModuleList itself: FSDP2 of torch 2.11 refuses one, also where it has a forward.
    """

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, index: int, **inputs: Any) -> Any:
        """Run the forward of stage `index` of this rank."""
        return self.stages[index](**inputs)


class ModelBuilder:
    """This rank's stages while transforms work on them.

    Attributes:
        stages: one a virtual stage, in order; one for the whole model without a pipeline.
        boundary_shapes: shapes of what crosses stage boundaries; set by `boundary_shapes`.
        context: how sequences are split over ranks; set by `context`.
        routers: the routers of experts; set by `routers`.
        gradient_hooks: hooks of the user's parameters on their gradients, by name.
        accumulate_grad_hooks: those that are called once a gradient is accumulated, by name.
        parameter_attributes: attributes that the user's code has set on parameters, by name.
        is_users: whether classes of the model are the user's.
        mentions_data: whether the user's code, initializers aside, has an attribute `data`, by which it may write
            parameters behind autograd's back.
    """

    def __init__(self, model: nn.Module, numbers: tuple[int, ...]) -> None:
        models = [model, *(deep_copy(model) for _ in numbers[1:])]
        stage_numbers: tuple[int | None, ...] = numbers or (None,)
        self.stages = [StageBuilder(stage, number) for stage, number in zip(models, stage_numbers, strict=True)]
        self.gradient_hooks = find_gradient_hooks(model)  # of parameters that transforms make anew
        self.accumulate_grad_hooks = {
            name: accumulate_grad_hooks(model.get_parameter(name)) for name in find_accumulate_grad_hooks(model)
        }
        self.parameter_attributes = {
            name: dict(vars(value)) for name, value in model.named_parameters() if vars(value) and not is_fake(value)
        }
        self.is_users, self.mentions_data = bool(user_namespaces(model.modules())), mentions(model, "data")
        self.boundary_shapes: BoundaryShapes | None = None
        self.context: ContextParallel | None = None
        self.routers: ExpertRouters | None = None
        self._shared_root: SharedRoot | None = None

    def share_parameters(self) -> None:
        """Let stages of this rank share parameters of one name (ties, where the ends of a V meet), under one root."""
        first: dict[str, nn.Parameter] = {}
        is_shared = False
        for stage in self.stages:
            for name, parameter in list(stage.model.named_parameters(remove_duplicate=False)):
                owner, _, leaf = name.rpartition(".")
                stage.model.get_submodule(owner).register_parameter(leaf, first.setdefault(name, parameter))
                is_shared = is_shared or first[name] is not parameter
        if is_shared:
            self._shared_root = SharedRoot(stage.model for stage in self.stages)

    def roots(self) -> list[tuple[nn.Module, list[StageBuilder]]]:
        """Return the roots that are sharded and get their storage together, each with its stages."""
        if self._shared_root is not None:
            return [(self._shared_root, self.stages)]
        return [(stage.model, [stage]) for stage in self.stages]

    def finish(self, inputs: BuildInputs) -> ParallelModel:
        """Make the model of the stages: what ties them, what lives where, and what drives them. Collective."""
        plan, layout, facts = inputs.plan, inputs.layout, inputs.facts
        splits = self.stages[0].splits
        tied = tied_across(plan, facts)
        for ranks in dict.fromkeys(tied.values()):
            layout.holders_group(ranks)  # here, where every rank is, for a group is made by all
        tensor_map = TensorMap.of([stage.model for stage in self.stages], layout, splits, tied, facts.packed)
        for name, attributes in self.parameter_attributes.items():
            if name in tensor_map.names:
                vars(tensor_map[name].parameter).update(attributes)
        for name, hooks in self.accumulate_grad_hooks.items():
            for hook in hooks.values():
                tensor_map[name].parameter.register_post_accumulate_grad_hook(hook)
        partial_gradients = partial_parameters(tensor_map, facts, layout, plan.sequence_parallel)
        return ParallelModel(
            [self._part(index) for index in range(len(self.stages))],
            plan,
            layout,
            facts,
            tensor_map,
            inputs.device,
            partial_gradients,
            {name: ranks for name, ranks in tied.items() if name in tensor_map.names},
            self._pipeline(inputs),
            self.context,
            {name: hooks for name, hooks in self.gradient_hooks.items() if name in tensor_map.names},
            self._uses(plan),
            self._unsharded(plan, tensor_map),
            self._statistics(inputs),
            self.routers,
        )

    def _statistics(self, inputs: BuildInputs) -> RunningStatistics | None:
        if not inputs.facts.buffers:
            return None
        for axes in ((*data_axes(), Axis.PIPELINE), data_axes()):
            inputs.layout.group(*axes)  # here, where every rank is, for a group is made by all
        synchronised = inputs.plan.job.model.running_statistics == "synchronised"
        return RunningStatistics(
            [stage.model for stage in self.stages], inputs.facts.buffers, inputs.layout, synchronised
        )

    def _uses(self, plan: Plan) -> list[UnitUse]:
        """Return the use of units under each root; the blocks of a stage cannot be skipped."""
        roots = {id(stage.fsdp_modules): stage.fsdp_modules for stage in self.stages if stage.fsdp_modules}
        may_skip = plan.degrees[Axis.PIPELINE] == 1
        return [UnitUse(modules, may_skip, self.is_users, self.mentions_data) for modules in roots.values()]

    def _unsharded(self, plan: Plan, tensor_map: TensorMap) -> list[str]:
        """Return the trainable parameters that several ranks hold without FSDP2, in one order on all ranks."""
        if not plan.needs_fsdp:
            return []
        entries = (entry for entry in tensor_map if not isinstance(entry.parameter, DTensor) and entry.replication > 1)
        return [entry.name for entry in entries if entry.parameter.requires_grad and entry.parameter.numel()]

    def _part(self, index: int) -> ModelPart:
        stage, root = self.stages[index], self._shared_root
        root_forward = None if root is None else partial(root, index)
        return ModelPart(
            stage.model, stage.head, stage.boundary, stage.weight_gradients, stage.fsdp_modules, root_forward
        )

    def _pipeline(self, inputs: BuildInputs) -> Pipeline | None:
        boundaries = [stage.boundary for stage in self.stages if stage.boundary is not None]
        if not boundaries:
            return None
        hidden = inputs.facts.stages.hidden or (inputs.plan.positions, inputs.facts.hidden_size)
        writes = [
            StageWrites(stage.model) if self.mentions_data and not stage.fsdp_modules else None for stage in self.stages
        ]
        return Pipeline(inputs.plan, inputs.layout, boundaries, hidden, inputs.device, writes)


class Transform(Protocol):
    """One change of the model, in a file of its own under parallel/transforms/, named like the file.

    Attributes:
        name: the file's; its rules, where it has some, are in plan/rules/<name>.py.
        axis: the axis that it serves; at degree 1 of it the transform is left out. None: it serves none.
    """

    name: str
    axis: Axis | None = None

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        """Return True if the plan asks for the transform; degrees of 1 are left out before."""
        ...

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        """Change the stages in place."""
        ...
