"""The caller of apex's operations on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

CHUNK = 65536  # elements that one of apex's thread blocks takes; of no effect here


def multi_tensor_applier(
    operation: Callable[..., Any], overflow: Tensor, lists: Sequence[Sequence[Tensor]], *arguments: Any
) -> Any:
    """`operation` on `lists`, as apex calls its kernels."""
    return operation(CHUNK, overflow, lists, *arguments)
