"""Finds the routers beside stacks of experts, by what transformers records of them.

`_can_record_outputs` of a model names the class of its routers and which of their outputs are the logits. Their
balancing loss is defined over those.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from shardwise.model.experts import expert_stacks, is_routed

CORRECTION_BIAS = "e_score_correction_bias"  # buffer of routers that are balanced by a bias instead of a loss
RECORDED = "router_logits"
ADDS_LOSS = "adds_balancing_loss"  # attribute of a built model: its config has asked for output_router_logits


def config_as_given(model: nn.Module, adds_loss: bool) -> PreTrainedConfig:
    """Return the config of a built model as it is to be written: with the `output_router_logits` that its user had."""
    given: Any = model
    config: PreTrainedConfig = copy.deepcopy(given.config)
    if adds_loss:
        config.output_router_logits = True
    return config


def find_routers(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Return stack of experts -> (its router, the number of its output that holds the logits).

    A stack is left out where it has no router beside it that transformers records, or several, and where the router
    has other classes than experts, such as one for tokens that skip them, or its weights do not reach the stack. There
    are none where layers have different numbers of experts, over which no one loss could be taken.
    """
    recorded = _recorded_routers(model)
    stacks = {name: number for name, number in expert_stacks(model).items() if is_routed(model.get_submodule(name))}
    if len(set(stacks.values())) > 1:
        return {}
    routers: dict[str, tuple[str, int]] = {}
    for stack in stacks:
        parent = stack.rpartition(".")[0]
        beside = [name for name in recorded if name.rpartition(".")[0] == parent]
        if len(beside) == 1 and _has_classes(model.get_submodule(beside[0]), stacks[stack]):
            routers[stack] = beside[0], recorded[beside[0]]
    return routers


def correction_biases(model: nn.Module) -> dict[str, str]:
    """Return stack of experts -> the buffer that corrects its router's scores, [experts], of routers that are found."""
    buffers, stacks = dict(model.named_buffers()), expert_stacks(model)
    biases: dict[str, str] = {}
    for stack in find_routers(model):
        number = stacks[stack]
        inside = f"{stack.rpartition('.')[0]}."
        names = [
            name for name, buffer in buffers.items()
            if name.startswith(inside) and name.endswith(f".{CORRECTION_BIAS}") and buffer.numel() == number
        ]  # fmt: skip
        if len(names) == 1:
            biases[stack] = names[0]
    return biases


def _has_classes(router: nn.Module, number: int) -> bool:
    """Return True if a weight or buffer of the router has a row for each of `number` experts."""
    return any(number in tensor.shape for tensor in (*router.parameters(), *router.buffers()))


def _recorded_routers(model: nn.Module) -> dict[str, int]:
    """Return the modules whose router logits transformers records -> the number of the output."""
    routers: dict[str, int] = {}
    for owner in model.modules():
        recorders: Any = getattr(owner, "_can_record_outputs", None) or {}
        recorder = recorders.get(RECORDED)
        target = getattr(recorder, "target_class", None)
        if target is None:
            continue
        ending = getattr(recorder, "layer_name", None) or ""
        routers |= {
            name: recorder.index
            for name, module in model.named_modules()
            if isinstance(module, target) and name.endswith(ending)
        }
    return routers
