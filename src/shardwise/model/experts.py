"""Finds the stacks of experts in a model, and whether ranks can share them out.

Nearly all of transformers' mixtures keep the experts of a layer in one module, every parameter of which is a stack
[experts, ...], and call it with (hidden states [T, H], experts of each token [T, k], their weights [T, k]). The router
stays outside. That call is the one seam of expert parallelism.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.model.capability import Capability, unless

# Arguments of the forward of experts, in the two spellings of transformers.
ROUTED = (["hidden_states", "top_k_index", "top_k_weights"], ["hidden_states", "router_indices", "routing_weights"])
NUMBER = "num_experts"  # attribute of experts that says how many there are
GROUPED = "grouped_mm"  # transformers' implementation by grouped products, its default
TRANSPOSED = "is_transposed"  # and the one that says that their stacks are [experts, inputs, outputs]


def is_routed(module: nn.Module) -> bool:
    """Tell whether a module computes experts: it takes what a router of transformers' gives."""
    return list(inspect.signature(module.forward).parameters) in ROUTED


def expert_stacks(model: nn.Module) -> dict[str, int]:
    """Return the modules that ranks can share out, by name, each with the number of its experts."""
    return {name: getattr(module, NUMBER) for name, module in _routed(model) if not _unlike_stacks(module)}


def computes_grouped(model: nn.Module) -> bool:
    """Return whether some experts of `model` are computed by grouped products, which are not there in fp64.

    The config says so to experts whose forward transformers has wrapped; others compute in their own way.
    """
    return any(is_grouped(module) for _, module in _routed(model))


def is_grouped(experts: nn.Module) -> bool:
    """Return True if the forward of `experts`, as transformers has it, takes grouped products."""
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return hasattr(type(experts).forward, "__wrapped__") and implementation == GROUPED


def expert_matrices(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the stacks [experts, outputs, inputs] in these modules."""
    modules = [(name, model.get_submodule(name)) for name in expert_stacks(model)]
    return tuple(
        f"{name}.{leaf}"
        for name, module in modules
        if not getattr(module, TRANSPOSED, False)
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    )


def expert_capability(model: nn.Module, blocks: tuple[str, ...]) -> Capability:
    """Answer whether ranks can share the experts of `model`, of which `blocks` are the repeated blocks."""
    return unless(next(_obstacles(model, blocks), ""))


def _obstacles(model: nn.Module, blocks: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(model, PreTrainedModel):
        yield "a module of model.factory does not say which of its parameters are experts"
        return
    name = model.config.model_type
    if getattr(model.config, "expert_capacity", None):
        yield f"the experts of {name} drop tokens beyond their capacity, so that the result depends on the batch"
    routed = dict(_routed(model))
    if not routed:
        yield f"{name} has no stack of experts that is called with hidden states, expert numbers and weights"
    for expert_name, module in routed.items():
        if unlike := _unlike_stacks(module):
            yield f"{expert_name!r} of {name} {unlike}"
        if not expert_name.startswith(tuple(f"{block}." for block in blocks)):
            yield f"{expert_name!r} of {name} is outside of the blocks"


def _routed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if is_routed(module))


def _unlike_stacks(module: nn.Module) -> str:
    """Return why a routed module is no stack of experts whose rows ranks could share; empty where it is one."""
    number: Any = getattr(module, NUMBER, None)
    if not isinstance(number, int) or number < 2:
        return f"does not say in {NUMBER!r} how many experts it has"
    for leaf, parameter in module.named_parameters():
        if not parameter.dim() or len(parameter) != number:
            return f"holds {leaf!r} {list(parameter.shape)} beside its {number} experts"
    return ""


def indivisible(stacks: Mapping[str, int], degree: int) -> str:
    """Return the first of `stacks` whose number `degree` does not divide; empty where there is none."""
    return next((name for name, number in stacks.items() if number % degree), "")
