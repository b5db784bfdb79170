"""Sharded data parallelism (MiCS, arXiv 2205.00119) on FSDP2, for ranks that shard nothing too where dtypes differ.

Gradients are summed, never divided: the step seeds backward with the one normalisation. When they are reduced is in
parallel/gradient_sync.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardwise._torch_compat.fsdp2 import gradient_sums
from shardwise._torch_compat.groups import clear_placement_cache
from shardwise.collectives import registration
from shardwise.collectives.fsdp import name_collectives, overlap
from shardwise.job.axes import Axis
from shardwise.job.devices import copies_aside
from shardwise.kernels.float8_gather import gather_in_float8
from shardwise.kernels.precision import torch_dtype
from shardwise.model.facts import ModelFacts
from shardwise.model.parameter_kinds import is_shardable
from shardwise.parallel.builder import BuildInputs, ModelBuilder, StageBuilder, Transform
from shardwise.parallel.caller_containers import CallerContainers
from shardwise.parallel.layout import Layout
from shardwise.plan.plan import Plan

# The root returns the final hidden states, a view; the loss reads them and never writes into them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class ShardedParameters(Transform):
    """FSDP2 around groups of blocks and around each root, which stages that share parameters have together."""

    name = "sharding"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return plan.needs_fsdp

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for root, stages in build.roots():
            groups = [group for stage in stages for group in stage.unit_groups(inputs)]
            keys = (inputs.facts.activation_arguments or (0,)) if inputs.plan.keeps_float_arguments else None
            experts = [stage.model.get_submodule(name) for stage in stages for name in _shared_experts(stage, inputs)]
            modules = shard_model(root, groups, inputs.plan, inputs.layout, keys, not inputs.facts.has_config, experts)
            for stage in stages:
                stage.fsdp_modules = modules
                if stage.weight_gradients is not None:
                    stage.weight_gradients.sums = gradient_sums(modules)


def _shared_experts(stage: StageBuilder, inputs: BuildInputs) -> list[str]:
    """Return the names of this stage's experts, if ranks share them."""
    if inputs.plan.degrees[Axis.EXPERT] == 1:
        return []
    blocks = tuple(f"{block}." for block in stage.block_names(inputs.facts))
    return [name for name in inputs.facts.expert_stacks if name.startswith(blocks)]


def shard_model(
    model: nn.Module,
    groups: Sequence[list[nn.Module]],
    plan: Plan,
    layout: Layout,
    cast_arguments: Sequence[int | str] | None = None,
    keeps_tensors: bool = False,
    experts: Sequence[nn.Module] = (),
) -> list[FSDPModule]:
    """Shard every group of blocks as one unit and the rest of `model` as the root; return all FSDP modules.

    Args:
        model: the root.
        groups: of blocks.
        plan: what will run.
        layout: where this rank stands.
        cast_arguments: positions and names of the blocks' arguments that are cast to the compute dtype; unset: all.
        keeps_tensors: whether blocks may keep tensors on themselves that backward goes through.
        experts: modules in the blocks that ranks share; units of their own, over the ranks that hold the same experts,
            where there are several.
    """
    clear_placement_cache()
    keep = plan.holds_whole or not plan.job.parallel.reshard_after_forward
    mixed = _mixed_precision(plan)
    containers = {block: CallerContainers(block, keeps_tensors) for block in chain(*groups)}
    containers[model] = CallerContainers(model, False)  # its parameters stay gathered
    of_blocks = mixed if cast_arguments is None else replace(mixed, cast_forward_inputs=False)
    shard: dict[str, Any] = {"offload_policy": _offload(plan), "ignored_params": set(_unsharded(model))}
    if plan.leaves_experts:
        shard["ignored_params"] |= {parameter for stack in experts for parameter in stack.parameters()}
    else:
        _shard_experts(experts, layout, not keep, mixed, shard)
    shard["mesh"] = layout.shard_mesh()
    for index, group in enumerate(groups):
        unit = group if len(group) > 1 else group[0]
        free = not keep and not (plan.keeps_last_unit and index == len(groups) - 1)
        fully_shard(unit, reshard_after_forward=free, mp_policy=of_blocks, **shard)  # type: ignore[arg-type]
        if cast_arguments is not None:
            cast = partial(_cast_arguments, cast_arguments, torch_dtype(plan.dtypes.compute))
            for block in group:
                block.register_forward_pre_hook(cast, with_kwargs=True)
    # Embeddings, final norm and head: needed at both ends of forward and first in backward, so they stay gathered.
    of_root = replace(mixed, cast_forward_inputs=False) if plan.keeps_float_arguments else mixed
    fully_shard(model, reshard_after_forward=False, mp_policy=of_root, **shard)
    modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for owner, hooks in containers.items():
        hooks.watch(owner)  # type: ignore[arg-type]
    _sum_gradients(modules, plan.world.size)
    name_collectives(modules)
    if plan.gathers_float8:
        gather_in_float8(modules)
    _prefetch([group[0] for group in groups], plan.job.parallel.prefetch_depth)
    if overlaps(plan):
        overlap(modules)
    return modules


def _shard_experts(
    experts: Sequence[nn.Module],
    layout: Layout,
    reshards: bool,
    mixed: MixedPrecisionPolicy,
    shard: Mapping[str, Any],
) -> None:
    """Make each stack of experts a unit over the ranks that hold the same experts."""
    # What the router gives keeps its dtype, as where the experts are no unit of their own.
    own = replace(mixed, cast_forward_inputs=False)
    if layout.expert_degree == 1:
        return
    mesh = layout.experts.mesh()  # on every rank, for a group is made by all: a stage may have no experts
    for stack in experts:
        fully_shard(stack, mesh=mesh, reshard_after_forward=reshards, mp_policy=own, **shard)


def _sum_gradients(modules: Sequence[FSDPModule], ranks: int) -> None:
    """Let FSDP2 sum gradients and divide nothing: `Normalisation` divides the loss."""
    for module in modules:
        # These switches do not recurse; on the root alone the blocks' gradients would be divided silently.
        if ranks > 1:  # torch divides by their number; for one rank that is nothing, while a factor of 1.0 is a pass
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _unsharded(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that FSDP2 cannot shard; packed weights are sharded though they are integers."""
    packed = {id(module.weight) for module in model.modules() if hasattr(module, "packing")}
    for parameter in model.parameters():
        if not is_shardable(parameter) and id(parameter) not in packed:
            yield parameter


def overlaps(plan: Plan) -> bool:
    """Return True where the network carries the bytes, so that a CPU is free to compute. On one host the CPU does.

    Backwards in a pipeline, and those that leave gradients for later, reduce outside of autograd.
    """
    from_cpus = plan.world.device_type == "cpu" and plan.backend == registration.BACKEND
    return from_cpus and plan.world.hosts > 1 and plan.degrees[Axis.PIPELINE] == 1 and not plan.holds_whole


def _mixed_precision(plan: Plan) -> MixedPrecisionPolicy:
    if plan.dtypes.compute == plan.dtypes.parameters:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(plan.dtypes.compute), reduce_dtype=torch_dtype(plan.dtypes.reduction)
    )


def _cast_arguments(
    keys: Sequence[int | str], dtype: torch.dtype, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the arguments `keys` of a block's call to `dtype`; a forward pre-hook."""

    def cast(key: int | str, value: Any) -> Any:
        return value.to(dtype) if key in keys and isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(cast(*item) for item in enumerate(args)), {name: cast(name, value) for name, value in kwargs.items()}


def _offload(plan: Plan) -> OffloadPolicy:
    if not plan.job.memory.offload_parameters:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=copies_aside(plan.world.device_type))


def _prefetch(units: Sequence[nn.Module], depth: int) -> None:
    """Gather the next `depth` units while one computes; 0 leaves the order to FSDP2 (one ahead in backward only)."""
    if depth == 0:
        return
    for index, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + depth]))  # type: ignore[arg-type]
        unit.set_modules_to_backward_prefetch(list(units[max(0, index - depth) : index])[::-1])  # type: ignore[arg-type]
