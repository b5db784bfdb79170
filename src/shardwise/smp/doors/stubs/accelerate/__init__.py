"""Stands for accelerate where scripts import it for models without values: `init_empty_weights`, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__version__ = "0.0"


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Inside, parameters are on the meta device once their module has them.

    Args:
        include_buffers: whether buffers are too; they keep their values otherwise.
    """
    if include_buffers:
        with torch.device("meta"):
            yield
        return
    module: Any = nn.Module
    torch_register: Callable[..., None] = module.register_parameter

    def register(self: Any, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        torch_register(self, name, param)

    module.register_parameter = register
    try:
        yield
    finally:
        module.register_parameter = torch_register
