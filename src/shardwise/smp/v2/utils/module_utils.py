"""Moving modules for scripts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def empty_module_params(module: nn.Module, device: Any = None, recurse: bool = False) -> nn.Module:
    """`module` with its parameters in new storage without values, on `device` or the current CUDA device."""
    return module.to_empty(device=device if device is not None else _current(), recurse=recurse)


def move_buffers_to_device(module: nn.Module, device: Any, recurse: bool = False) -> nn.Module:
    """`module` with its buffers on `device`; its parameters stay."""
    for part in module.modules() if recurse else [module]:
        for leaf, buffer in part._buffers.items():
            part._buffers[leaf] = None if buffer is None else buffer.to(device)
    return module


def _current() -> torch.device:
    from shardwise.smp.v2.state_handler import state

    return state.device
