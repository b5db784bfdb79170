"""A mode for forwards that decide by the values of tensors, on tensors that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ASKS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist"}
MOST = 300  # answers; a loop that waits for another value would not end


class FixedValues(TorchFunctionMode):
    """A mode in which every number that Python asks of a tensor is `value`; None leaves it the tensor's own.

    Raises:
        RuntimeError: in the forward, when it has asked too often.
    """

    def __init__(self, value: float | None) -> None:
        super().__init__()
        self.value = value
        self._left = MOST

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in ASKS or not args or not isinstance(args[0], Tensor):
            return func(*args, **(kwargs or {}))
        self._left -= 1
        if self._left < 0:
            raise RuntimeError(f"the forward asks for more than {MOST} values of tensors")
        if self.value is None:
            return func(*args, **(kwargs or {}))
        kind = {"__bool__": bool, "__int__": int, "__index__": int, "__float__": float}.get(name, _kind(args[0].dtype))
        return _nested(kind(self.value), args[0].shape if name == "tolist" else ())


def _kind(dtype: torch.dtype) -> type[Any]:
    """Return Python's type of the numbers in a tensor."""
    if dtype == torch.bool:
        return bool
    return float if dtype.is_floating_point else complex if dtype.is_complex else int


def _nested(number: Any, shape: tuple[int, ...]) -> Any:
    return number if not shape else [_nested(number, shape[1:]) for _ in range(shape[0])]
