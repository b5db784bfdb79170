"""The oracle's own adapters: beside each layer that the job names, a hook adds what the papers define.

LoRA (arXiv 2106.09685, equation 3): h = W x + (alpha / r) B A x. DoRA (arXiv 2402.09353, equation 5): the rows of
W + (alpha / r) B A, over their length, times the magnitude m; the length is no function of the parameters in backward
(section 4.3). Dropout is of x where an adapter reads it. Each expert W of a stack [experts, outputs, inputs] computes
with W + (alpha / r) B A.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from shardwise._torch_compat.modules import replaced_parameters
from shardwise.errors import ModelError
from shardwise.job.schema import AdapterSection


def adapt(model: nn.Module, settings: AdapterSection, weights: Container[str]) -> nn.Module:
    """Give `model` the adapters that `settings` ask for, as they start; the same model.

    Args:
        weights: names of the run's parameters. A layer whose weight is read and that is never called has no adapter
            there; one that is called all the same is a mistake.
    """
    if settings.kind == "none":
        return model
    repeated = [re.escape(name) for name in settings.modules_to_save]
    left_out = re.compile(rf".*({'|'.join(repeated)})(\..*)?" if repeated else r"(?!)")
    for name, layer in list(model.named_modules()):
        is_linear = type(layer) in (nn.Linear, Conv1D) and _in_a_block(name)
        if is_linear and _is_named(name, settings) and not left_out.fullmatch(name):
            if f"{name}.lora_A.weight" in weights:
                _add(layer, name, settings)
            else:
                layer.register_forward_pre_hook(partial(_refuse_call, name))
    for name, module in list(model.named_modules()):
        stacks = [leaf for leaf, _ in module.named_parameters(recurse=False) if _is_stack(f"{name}.{leaf}", settings)]
        if stacks:
            _add_to_stacks(module, name, stacks, settings)
    return model


def _is_stack(name: str, settings: AdapterSection) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in settings.target_parameters)


def _add_to_stacks(module: Any, name: str, stacks: list[str], settings: AdapterSection) -> None:
    """Let a module of experts be called with changed stacks."""
    module.stack_adapters = nn.ModuleDict()
    for leaf in stacks:
        rank, scaling = _rank_and_scaling(f"{name}.{leaf}", settings)
        experts, outputs, inputs = getattr(module, leaf).shape
        adapter: Any = nn.Module()
        adapter.lora_A, adapter.lora_B = nn.Module(), nn.Module()
        adapter.lora_A.weight = nn.Parameter(torch.empty(experts, rank, inputs).uniform_(-1, 1) / math.sqrt(inputs))
        adapter.lora_B.weight = nn.Parameter(torch.zeros(experts, outputs, rank))
        adapter.lora_scaling = scaling
        module.stack_adapters[leaf] = adapter
    forward = module.forward

    def update(adapter: Any) -> Tensor:
        return adapter.lora_scaling * torch.einsum("eor,eri->eoi", adapter.lora_B.weight, adapter.lora_A.weight)

    def with_changed_stacks(*args: Any, **kwargs: Any) -> Any:
        changed = {leaf: getattr(module, leaf) + update(module.stack_adapters[leaf]) for leaf in stacks}
        with replaced_parameters(module, changed):
            return forward(*args, **kwargs)

    module.forward = with_changed_stacks


def _in_a_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _is_named(name: str, settings: AdapterSection) -> bool:
    targets = settings.target_modules
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _add(layer: Any, name: str, settings: AdapterSection) -> None:
    rank, layer.lora_scaling = _rank_and_scaling(name, settings)
    inputs, outputs = layer.weight.shape if isinstance(layer, Conv1D) else layer.weight.shape[::-1]
    layer.lora_A = nn.Linear(inputs, rank, bias=False)
    layer.lora_B = nn.Linear(rank, outputs, bias=False)
    nn.init.zeros_(layer.lora_B.weight)
    layer.lora_dropout = nn.Dropout(settings.dropout)
    if settings.kind == "dora":
        rows = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        layer.lora_magnitude_vector = nn.Module()
        layer.lora_magnitude_vector.weight = nn.Parameter(rows.detach().norm(dim=1))
    layer.register_forward_hook(_adapted_output)


def _refuse_call(name: str, layer: nn.Module, inputs: Any) -> None:
    raise ModelError(
        f"{name} is called by the model, adapter.target_modules names it, and the run has no adapter there"
    )


def _rank_and_scaling(name: str, settings: AdapterSection) -> tuple[int, float]:
    """Return the rank of the adapter of a layer or stack, and the factor of its product."""
    rank, alpha = settings.rank, settings.alpha
    for pattern, value in reversed(settings.rank_pattern.items()):
        rank = value if re.search(rf"(^|\.)({pattern})$", name) else rank
    for pattern, number in reversed(settings.alpha_pattern.items()):
        alpha = number if re.search(rf"(^|\.)({pattern})$", name) else alpha
    return rank, alpha / (math.sqrt(rank) if settings.rslora else rank)


@contextmanager
def scaled_twice(model: nn.Module) -> Iterator[None]:
    """Let adapters make the mistake of multiplying by alpha / rank twice inside."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "lora_scaling")]
    for layer in layers:
        layer.lora_scaling = layer.lora_scaling**2
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_scaling = math.sqrt(layer.lora_scaling)


def _adapted_output(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    scaling: float = layer.lora_scaling
    values: Tensor = layer.lora_dropout(inputs[0])
    if not hasattr(layer, "lora_magnitude_vector"):
        return output + scaling * layer.lora_B(layer.lora_A(values))
    own = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    changed = own + scaling * layer.lora_B.weight @ layer.lora_A.weight
    rows = layer.lora_magnitude_vector.weight / changed.detach().norm(dim=1)
    return output + values @ (rows[:, None] * changed - own).T
