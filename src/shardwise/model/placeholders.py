"""Placeholders for modules that a pipeline stage does not hold: a forward of the right shape, and no parameters.

Forwards ask weights of such modules for their dtype (`hidden.to(self.lm_head.weight.dtype)`); of an `AbsentWeight` that
and its device are known, and everything else is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.facts import PlaceholderShape
from shardwise.model.initializers import ABSENT


@dataclass(frozen=True)
class AbsentWeight:
    """A parameter that another stage holds, in a forward."""

    dtype: torch.dtype
    device: torch.device


class AbsentWeights:
    """Parameters that a model has lost: None as torch has it, for what initializes or ties parameters.

    In a forward, within `shown`, an `AbsentWeight` is in the place of each.

    Args:
        dtype: in which the stages that hold them compute with them.
        device: where a stage computes.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = AbsentWeight(dtype, device)
        self._places: list[tuple[nn.Module, str]] = []

    def drop(self, module: nn.Module, forward: Callable[..., Tensor], kept: Collection[int] = ()) -> bool:
        """Take away the module's own parameters except those in `kept`, by id; return True if any stays."""
        module.forward = forward  # type: ignore[method-assign]
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in kept:
                module.register_parameter(name, None)
                self._places.append((module, name))
                vars(module).setdefault(ABSENT, {})[name] = nn.Parameter(parameter.detach().to("meta"))
        return any(True for _ in module.named_parameters(recurse=False))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let what reads such a parameter find an `AbsentWeight`, ahead of torch's None."""
        for module, name in self._places:
            vars(module)[name] = self._weight
        try:
            yield
        finally:
            for module, name in self._places:
                vars(module).pop(name, None)


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
