"""Sharded data parallelism (MiCS, arXiv 2205.00119) on FSDP2, and parameters of ranks that shard nothing.

Gradients are summed, never divided: the step seeds backward with the one normalisation. Within a shard group they are
reduce-scattered every micro-step; replicas all-reduce once, on the last (section 4.3 of the paper, two-hop).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardwise._torch_compat import clear_placement_cache, reduce_left_gradients
from shardwise.collectives import engine
from shardwise.collectives.fsdp import overlap
from shardwise.job.axes import Axis
from shardwise.kernels.float8_gather import gather_in_float8
from shardwise.kernels.precision import torch_dtype
from shardwise.parallel.layout import Layout
from shardwise.plan.plan import Plan

# The root returns the final hidden states, a view; the loss reads them and never writes into them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def shard(model: nn.Module, groups: Sequence[list[nn.Module]], plan: Plan, layout: Layout) -> list[FSDPModule]:
    """Shard every group of blocks as one unit and the rest of `model` as the root; returns all FSDP modules."""
    clear_placement_cache()
    mesh = layout.shard_mesh()
    keep = plan.holds_whole or not plan.job.parallel.reshard_after_forward
    mixed, offload = _mixed_precision(plan), _offload(plan)
    for index, group in enumerate(groups):
        unit = group if len(group) > 1 else group[0]
        free = not keep and not (plan.keeps_last_unit and index == len(groups) - 1)
        fully_shard(unit, mesh=mesh, reshard_after_forward=free, mp_policy=mixed, offload_policy=offload)  # type: ignore[arg-type]
    # Embeddings, final norm and head: needed at both ends of forward and first in backward, so they stay gathered.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=mixed, offload_policy=offload)
    modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        # These switches do not recurse; on the root alone the blocks' gradients would be divided silently.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if plan.gathers_float8:
        gather_in_float8(modules)
    _prefetch([group[0] for group in groups], plan.job.parallel.prefetch_depth)
    if _overlaps(plan):
        overlap(modules)
    return modules


def _overlaps(plan: Plan) -> bool:
    """Where the network works, a CPU is free to compute. On one host it is the CPU that carries the bytes.

    Backwards in a pipeline, and those that leave gradients for later, reduce outside of autograd.
    """
    from_cpus = plan.world.device_type == "cpu" and plan.backend == engine.BACKEND
    return from_cpus and plan.world.hosts > 1 and plan.degrees[Axis.PIPELINE] == 1 and not plan.holds_whole


def begin_microbatch(modules: Sequence[FSDPModule], plan: Plan, last: bool) -> None:
    """Say what the coming backward synchronises: on the last one all, before it nothing (ZeRO-1) or the shard group.

    Of a backward that leaves gradients for later none does; `reduce_gradients` follows.
    """
    for module in modules:
        if plan.holds_whole:
            last = last and not plan.splits_backward
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
        else:
            module.set_requires_all_reduce(last, recurse=False)
    if modules and plan.degrees[Axis.PIPELINE] > 1:
        # FSDP2 gathers the root when its output's gradient arrives; a stage's gradient arrives at what left it instead.
        modules[0].unshard()


def reduce_gradients(modules: Sequence[FSDPModule]) -> None:
    """Reduce what the backwards of a step have left in whole gradients, and free the gathered parameters."""
    for module in modules:
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_reshard_after_backward(True, recurse=False)
    reduce_left_gradients(modules)


def materialize(model: nn.Module, device: torch.device, parameters_on: torch.device) -> None:
    """Give meta parameters storage on `parameters_on` (uninitialized) and move buffers to `device`.

    Buffers that hold values already (a user's own module) keep them; meta buffers are filled by `initialize`.
    """
    ties = _tied_names(model)
    kept = {name: buffer.to(device) for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=parameters_on)
    for first, *others in ties:  # to_empty makes a new parameter for every module that held the old one
        for name in others:
            _owner(model, name)._parameters[_leaf(name)] = model.get_parameter(first)
    for name, buffer in list(model.named_buffers()):
        _owner(model, name)._buffers[_leaf(name)] = kept.get(name, torch.empty_like(buffer, device=device))


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _mixed_precision(plan: Plan) -> MixedPrecisionPolicy:
    if plan.dtypes.compute == plan.dtypes.parameters:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(plan.dtypes.compute), reduce_dtype=torch_dtype(plan.dtypes.reduction)
    )


def _offload(plan: Plan) -> OffloadPolicy:
    if not plan.job.memory.offload_parameters:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=plan.world.device_type == "cuda")


def _prefetch(units: Sequence[nn.Module], depth: int) -> None:
    """Gather the next `depth` units while one computes; 0 leaves the order to FSDP2 (one ahead in backward only)."""
    if depth == 0:
        return
    for index, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + depth]))  # type: ignore[arg-type]
        unit.set_modules_to_backward_prefetch(list(units[max(0, index - depth) : index])[::-1])  # type: ignore[arg-type]
