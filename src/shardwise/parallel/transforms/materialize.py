"""Storage for parameters and buffers, which are on the meta device until here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise._torch_compat.autograd import version_of
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.plan.plan import Plan

WRITES = "writes_when_blank"  # attribute of a blank buffer


class Materialization(Transform):
    """Uninitialized storage for what this rank holds; `initialize` fills it."""

    name = "materialize"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return True

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        parameters_on = torch.device("cpu") if inputs.plan.job.memory.offload_parameters else inputs.device
        for root, _ in build.roots():
            with inputs.allocation():
                materialize(root, inputs.device, parameters_on)


def materialize(model: nn.Module, device: torch.device, parameters_on: torch.device) -> None:
    """Give meta parameters storage on `parameters_on` (uninitialized) and move buffers to `device`.

    Buffers that hold values already (a user's own module) keep them; meta buffers are blank until `initialize`.
    """
    ties = _tied_names(model)
    filled = {name: buffer.to(device) for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=parameters_on)
    for first, *others in ties:  # to_empty makes a new parameter for every module that held the old one
        for name in others:
            setattr(_owner(model, name), _leaf(name), model.get_parameter(first))
    for name, buffer in list(model.named_buffers()):
        setattr(_owner(model, name), _leaf(name), filled[name] if name in filled else _blank(buffer, device))


def is_blank(buffer: Tensor) -> bool:
    """Return whether nobody has filled a buffer that `materialize` made: some element is NaN, or none was written."""
    if not buffer.numel():
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().any())
    return getattr(buffer, WRITES, None) == version_of(buffer)


def _blank(buffer: Tensor, device: torch.device) -> Tensor:
    blank = torch.empty_like(buffer, device=device)
    blank.fill_(float("nan") if blank.is_floating_point() or blank.is_complex() else 0)
    setattr(blank, WRITES, version_of(blank))
    return blank


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
