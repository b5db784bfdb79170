"""Placeholders for modules that a pipeline stage does not hold: a forward of the right shape, and no parameters.

Forwards ask weights of such modules for their dtype (`hidden.to(self.lm_head.weight.dtype)`); of an `AbsentWeight` that
and its device are known, and everything else is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.facts import PlaceholderShape


@dataclass(frozen=True)
class AbsentWeight:
    """A parameter that another stage holds."""

    dtype: torch.dtype
    device: torch.device


def drop_parameters(
    module: nn.Module, forward: Callable[..., Tensor], kept: Collection[int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Take away the module's own parameters except those in `kept`, by id; return True if any stays.

    Args:
        dtype: in which the stage that holds the parameters computes with them, on `device`.
    """
    module.forward = forward  # type: ignore[method-assign]
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if id(parameter) not in kept:
            module.register_parameter(name, None)
            vars(module)[name] = AbsentWeight(dtype, device)  # found ahead of torch's None
    return any(True for _ in module.named_parameters(recurse=False))


def placeholder(
    output_shape: PlaceholderShape | None, dtype: torch.dtype, device: torch.device
) -> Callable[..., Tensor]:
    """Return a forward whose output is zeros of the right shape; without one it returns its argument."""
    if output_shape is None:
        return _identity

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs)  # type: ignore[operator]
        follows = given[output_shape.argument]
        shape = output_shape.shape(follows.shape if isinstance(follows, Tensor) else follows)
        return torch.zeros(shape, dtype=dtype, device=device)  # some models scale what embeddings return in place

    return forward


def _identity(*args: Any, **kwargs: Any) -> Tensor:
    value: Tensor = args[0] if args else next(iter(kwargs.values()))
    return value
