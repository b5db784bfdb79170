"""State dicts of this rank's own shards, whose tensors are the live ones."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.smp.v2.grad_norm import plain_name


class SMStateDictType(enum.Enum):
    """What `sm_state_dict_type` gives."""

    SM_LOCAL_STATE_DICT = "local"


@contextmanager
def sm_state_dict_type(model: nn.Module, state_dict_type: SMStateDictType) -> Iterator[None]:
    """Inside, `model.state_dict()` holds this rank's shards by name: live, so that `load` fills the model itself."""
    assert state_dict_type is SMStateDictType.SM_LOCAL_STATE_DICT
    module: Any = model

    def local(*args: Any, **kwargs: Any) -> dict[str, Any]:
        values = [*model.named_parameters(), *model.named_buffers()]
        return {plain_name(name): value.detach() for name, value in values}

    @torch.no_grad()
    def fill(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in local().items():
            value.copy_(state_dict[name])

    module.state_dict, module.load_state_dict = local, fill
    try:
        yield
    finally:
        del module.state_dict, module.load_state_dict


@torch.no_grad()
def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = True) -> None:
    """Make the optimizer's state, as its first step does, without a change of parameters; for `load` to fill."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        wanted = parameter.requires_grad and (parameter.numel() > 0 or not skip_empty_param)
        parameter.grad = torch.zeros_like(parameter) if wanted else None
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient
