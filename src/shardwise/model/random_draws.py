"""Single random numbers that a forward draws, by which it may drop layers: on fake tensors they have no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Dice(TorchFunctionMode):
    """Lets `torch.rand([])` be `value`; where that is 1, no layer is dropped.

    OPT, and transformers 5.17's BART, throw a die a layer also where none is ever dropped.

    Attributes:
        thrown: how many.
    """

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value, self.thrown = value, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.rand and args in (([],), ((),), ()) and not kwargs.get("size"):
            self.thrown += 1
            return torch.tensor(self.value)
        return func(*args, **kwargs)
