"""Faults of adapters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from shardwise.kernels.adapters import LowRankProduct
from shardwise.testing.faults.patching import Fault, wrapped


def _scaled_twice() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Tensor], self: LowRankProduct, *args: Any) -> Tensor:
        twice = LowRankProduct(self.layer, self.scaling**2, self.transposed, self.group)
        return original(twice, *args)

    return wrapped(LowRankProduct, "__call__", wrapper)


ADAPTER_FAULTS: dict[str, Fault] = {"adapter_scaled_twice": _scaled_twice}
