"""Experts of a script's model, shared among ranks: cut in `tsm.transform`, wrapped by FSDP in units of their own.

FSDP averages gradients over the ranks that it reduces them among. An expert's gradient is already the sum over the
ranks that share the experts, so it is divided by their number here, and the mean is that of all other parameters.
Tensor ranks each send a part of the same tokens; the mean over them is made the sum again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardwise.errors import ConfigError
from shardwise.job.axes import Axis
from shardwise.kernels.experts import ExpertForward, SortedExperts
from shardwise.model.experts import ExpertCall, call_of, indivisible
from shardwise.model.facts import ModelFacts
from shardwise.parallel.experts import SharedExperts
from shardwise.parallel.tensor_map import ParameterSplit
from shardwise.parallel.transforms.expert import keep_own_experts
from shardwise.smp.v2.expert_ranks import SHARED, ExpertRanks
from shardwise.words import divisors, one_of


def share_experts(model: nn.Module, facts: ModelFacts, ranks: ExpertRanks) -> dict[str, ParameterSplit]:
    """Keep this rank's experts of `model` (on the meta device), whose calls then go to all ranks' experts.

    Returns:
        How parameters were split, by name.

    Raises:
        ConfigError: the model's experts cannot be shared, or not by so many ranks.
    """
    given = f"tsm.transform: expert_parallel_degree={ranks.degree}"
    capability = facts.supports(Axis.EXPERT)
    if not capability.ok:
        raise ConfigError(f"{given}: {capability.reason}; use 1")
    if name := indivisible(facts.expert_stacks, ranks.degree):
        number = facts.expert_stacks[name]
        raise ConfigError(f"{given} does not divide the {number} experts of {name}; use {one_of(divisors(number))}")
    splits: dict[str, ParameterSplit] = {}
    tensor = ranks.layout.group(Axis.TENSOR) if ranks.layout.size(Axis.TENSOR) > 1 else None
    factor = ranks.layout.size(Axis.TENSOR) / ranks.degree
    for name, number in facts.expert_stacks.items():
        stack: Any = model.get_submodule(name)
        splits |= keep_own_experts(stack, name, number, ranks.degree, ranks.index())
        call = call_of(stack) or ExpertCall.ROUTED
        own = SortedExperts(stack, _with_scaled_gradients(stack.forward, factor), call)
        stack.forward = SharedExperts(name, own, number, ranks.levels(), tensor).forward
        vars(stack)[SHARED] = ranks
    return splits


def _with_scaled_gradients(forward: ExpertForward, factor: float) -> ExpertForward:
    """Return `forward` with its parameters' gradients times `factor`, and no other's."""

    def run(rows: Tensor, *routes: Any) -> Tensor:
        outputs: Tensor = forward(_ScaledGradient.apply(rows, 1 / factor), *routes)
        scaled: Tensor = _ScaledGradient.apply(outputs, factor)
        return scaled

    return run


class _ScaledGradient(torch.autograd.Function):
    """Values as they are, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


# ---- under FSDP


def shared_stacks(model: nn.Module) -> dict[str, ExpertRanks]:
    """Return the stacks of experts in `model` that ranks share, by name."""
    return {name: vars(module)[SHARED] for name, module in model.named_modules() if SHARED in vars(module)}


def wrap_shared_experts(model: nn.Module, settings: dict[str, Any]) -> None:
    """Wrap the shared experts in `model` that are in no unit yet, by FSDP with `settings` but for groups.

    The replicas with other experts are left out of the groups over which gradients are reduced; tensor ranks are in.
    """
    for name, ranks in shared_stacks(model).items():
        if name.endswith("_fsdp_wrapped_module") or not name:
            continue
        group, own = settings["process_group"], dict(settings)
        own |= {"process_group": (group[0], ranks.copies()) if isinstance(group, tuple) else group}
        own |= {"auto_wrap_policy": None, "device_mesh": None}
        if own.get("mixed_precision") is not None:  # what the router gives keeps its dtype
            own["mixed_precision"] = dataclasses.replace(own["mixed_precision"], cast_forward_inputs=False)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, FullyShardedDataParallel(model.get_submodule(name), **own))


def refuse_unwrapped_experts(model: nn.Module) -> None:
    """Raise ConfigError where FSDP has flattened shared experts together with what is around them."""
    left = [name for name in shared_stacks(model) if not name.endswith("_fsdp_wrapped_module")]
    if left:
        raise ConfigError(
            f"FSDP: {left[0]!r} is shared among ranks, and auto_wrap_policy wraps no block around it; "
            "give transformer_auto_wrap_policy with the model's block"
        )


def experts_of_unit(unit: Any) -> ExpertRanks | None:
    """Return among which ranks the experts of an FSDP unit are shared; None for any other unit."""
    ranks: ExpertRanks | None = vars(unit.module).get(SHARED)
    return ranks
