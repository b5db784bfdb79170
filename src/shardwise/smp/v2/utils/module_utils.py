"""Moving modules for scripts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.smp.v2.session import state


def empty_module_params(module: nn.Module, device: Any = None, recurse: bool = False) -> nn.Module:
    """`module` with its parameters in new storage without values, on `device` or this rank's; ties stay ties.

    Its buffers stay as they are: models on the meta device have theirs with values where they were computed.
    """
    target = state.device if device is None else device
    empty: dict[int, nn.Parameter] = {}
    for part in module.modules() if recurse else [module]:
        for leaf, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            blank = torch.empty_like(parameter.detach(), device=target)
            empty.setdefault(id(parameter), nn.Parameter(blank, requires_grad=parameter.requires_grad))
            part.register_parameter(leaf, empty[id(parameter)])
    return module


def move_buffers_to_device(module: nn.Module, device: Any, recurse: bool = False) -> nn.Module:
    """`module` with its buffers on `device`; its parameters stay."""
    for part in module.modules() if recurse else [module]:
        for leaf, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, leaf, buffer.to(device))
    return module
