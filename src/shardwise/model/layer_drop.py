"""Fixes the random numbers by which a forward may drop layers (LayerDrop): on fake tensors they have no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class FixedScalarDraws(TorchFunctionMode):
    """A mode in which `torch.rand([])` is `value`; where that is 1, no layer is dropped.

    OPT, and transformers 5.17's BART, draw a number a layer even where none is ever dropped.

    Attributes:
        count: numbers drawn.
    """

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = value
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.rand and args in (([],), ((),), ()) and not kwargs.get("size"):
            self.count += 1
            return torch.tensor(self.value)
        return func(*args, **kwargs)
