"""Finds the stacks of experts in a model, and whether ranks can share them out.

Transformers' mixtures keep the experts of a layer in one module, every parameter of which is a stack [experts, ...], or
[experts * width, ...]. The router stays outside. The module's call is the one seam of expert parallelism. There are
three forms of it, `ExpertCall`, which are told apart by what a forward takes and does.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.job.capability import Capability, unless

# Arguments of the forward of experts, in the two spellings of transformers.
ROUTED = (["hidden_states", "top_k_index", "top_k_weights"], ["hidden_states", "router_indices", "routing_weights"])
SORTED = ["inputs", "expert_size"]
DENSE = ["hidden_states"]
NUMBER = "num_experts"  # attribute of experts that says how many there are
# Transformers' implementations: by grouped products, its default; by a copy of the weights for each row; and by a loop
# over experts that have rows, the one whose shapes depend on the routing.
GROUPED, BATCHED, LOOPED = "grouped_mm", "batched_mm", "eager"
TRANSPOSED = "is_transposed"  # and the one that says that their stacks are [experts, inputs, outputs]


class ExpertCall(Enum):
    """Arguments that a module of experts is called with.

    Attributes:
        ROUTED: hidden states [T, H], the experts of each token [T, k] and their weights [T, k].
        SORTED: rows [R, H] that are sorted by expert, and how many each expert has (JetMoE).
        DENSE: [experts * T, H], each token for each expert, times its score; 0 for those it does not go to (Llama 4).
    """

    ROUTED = auto()
    SORTED = auto()
    DENSE = auto()


def call_of(module: nn.Module) -> ExpertCall | None:
    """Return what `module` is called with where it computes experts, else None."""
    arguments = list(inspect.signature(module.forward).parameters)
    if arguments in ROUTED:
        return ExpertCall.ROUTED
    if arguments == SORTED:
        return ExpertCall.SORTED
    return ExpertCall.DENSE if arguments == DENSE and _is_dense(module) else None


def is_routed(module: nn.Module) -> bool:
    """Tell whether a module computes experts and takes what a router of transformers' gives."""
    return call_of(module) is ExpertCall.ROUTED


def holds_experts(module: nn.Module) -> bool:
    """Tell whether a module computes experts, whatever it is called with."""
    return call_of(module) is not None


def _is_dense(module: nn.Module) -> bool:
    """Tell whether a module has matrices [experts, ., .] alone, and first of all takes its rows as [experts, T, H]."""
    number: Any = getattr(module, NUMBER, None)
    parameters = list(module.parameters())
    if not parameters or len(list(module.parameters(recurse=False))) < len(parameters):
        return False
    if any(parameter.dim() != 3 or len(parameter) != number for parameter in parameters):
        return False
    tokens = number + 1
    return any(
        _first_result(module, torch.empty(number * tokens, width, device="meta")) == (number, tokens, width)
        for width in parameters[0].shape[1:]
    )


def _first_result(module: nn.Module, rows: Tensor) -> tuple[int, ...]:
    """Return the shape of the first tensor that the forward of `module` makes of `rows`; () where there is none."""
    try:
        with _FirstResult():
            module.forward(rows)
    except _FirstTensorMade as made:
        return tuple(made.args[0].shape)
    except Exception:  # whatever a forward raises that takes no such rows
        return ()
    return ()


class _FirstTensorMade(Exception):
    """The first tensor of a forward, which ends there."""


class _FirstResult(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            raise _FirstTensorMade(result)
        return result


def expert_stacks(model: nn.Module) -> dict[str, int]:
    """Return the modules that ranks can share out, by name, each with the number of its experts."""
    return {name: getattr(module, NUMBER) for name, module in _experts(model) if not _unlike_stacks(module)}


def computes_grouped(model: nn.Module) -> bool:
    """Return whether some experts of `model` are computed by grouped products, which are not there in fp64.

    The config says so to experts whose forward transformers has wrapped; others compute in their own way.
    """
    return any(is_grouped(module) for _, module in _experts(model))


def computes_looped(model: nn.Module) -> bool:
    """Return whether some experts of `model` are computed one after the other, though transformers could group them."""
    wrapped = (module for _, module in _experts(model) if hasattr(type(module).forward, "__wrapped__"))
    return any(getattr(module.config, "_experts_implementation", None) == LOOPED for module in wrapped)


def is_grouped(experts: nn.Module) -> bool:
    """Return True if the forward of `experts`, as transformers has it, takes grouped products."""
    return not ungrouped_reason(experts)


def ungrouped_reason(experts: nn.Module) -> str:
    """Return why the forward of `experts`, as transformers has it, takes no grouped products; empty where it does."""
    if not hasattr(type(experts).forward, "__wrapped__"):
        return f"transformers has no other for {type(experts).__name__}"
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return "" if implementation == GROUPED else f"experts_implementation is {implementation}"


def set_expert_implementation(model: nn.Module, implementation: str, instead_of: Collection[str] | None = None) -> None:
    """Let the experts of a model, if there are some, be computed in an implementation, or only `instead_of` others."""
    for config in [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]:
        earlier = getattr(config, "_experts_implementation", None)
        if isinstance(config, PreTrainedConfig) and (instead_of is None or earlier in instead_of):
            config._experts_implementation = implementation


def expert_matrices(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the stacks [experts, outputs, inputs] in these modules, of those that routers call."""
    modules = [(name, module) for name in expert_stacks(model) if is_routed(module := model.get_submodule(name))]
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
    experts = dict(_experts(model))
    if not experts:
        yield f"{name} has no stack of experts that is called in a way of transformers'"
    for expert_name, module in experts.items():
        if unlike := _unlike_stacks(module):
            yield f"{expert_name!r} of {name} {unlike}"
        if not expert_name.startswith(tuple(f"{block}." for block in blocks)):
            yield f"{expert_name!r} of {name} is outside of the blocks"


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if holds_experts(module))


def _unlike_stacks(module: nn.Module) -> str:
    """Return why a module of experts is no stack whose rows ranks could share; empty where it is one."""
    number: Any = getattr(module, NUMBER, None)
    if not isinstance(number, int) or number < 2:
        return f"does not say in {NUMBER!r} how many experts it has"
    for leaf, parameter in module.named_parameters():
        owner = module.get_submodule(leaf.rpartition(".")[0])
        if not parameter.dim() or (len(parameter) != number and not _is_flat(parameter, number, owner)):
            return f"holds {leaf!r} {list(parameter.shape)} beside its {number} experts"
    return ""


def _is_flat(parameter: Tensor, number: int, owner: nn.Module) -> bool:
    """Tell whether `parameter` is [experts * width, features]: its owner knows the width, and not the product."""
    width, rest = divmod(len(parameter), number)
    sizes = {size for size in vars(owner).values() if isinstance(size, int)}
    return parameter.dim() == 2 and not rest and width in sizes and len(parameter) not in sizes


def indivisible(stacks: Mapping[str, int], degree: int) -> str:
    """Return the first of `stacks` whose number `degree` does not divide; empty where there is none."""
    return next((name for name, number in stacks.items() if number % degree), "")
