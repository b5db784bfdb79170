"""Copies of module trees: functions on modules belong to the copy, what cannot be copied is shared."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.copies import deep_copy


class Wrapped(nn.Module):
    """A forward that is wrapped, and a hook that has captured the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        inner = self.layer.forward
        self.layer.forward = lambda x: inner(x) * 2  # type: ignore[method-assign]
        self.outputs: list[torch.Tensor] = []
        self.layer.register_forward_hook(lambda module, args, output: self.outputs.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def test_functions_of_a_copy_use_the_copy() -> None:
    module = Wrapped()
    copied = deep_copy(module)
    nn.init.zeros_(copied.layer.weight)
    nn.init.ones_(copied.layer.bias)
    assert torch.equal(copied(torch.ones(2)), torch.full((2,), 2.0))
    assert len(copied.outputs) == 1
    assert not module.outputs


def test_locks_are_shared() -> None:
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()  # type: ignore[assignment]
    copied = deep_copy(module)
    assert copied.lock is module.lock
    assert copied.weight is not module.weight


def test_a_generator_is_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].rates = (rate for rate in (0.1, 0.2))  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"0\.rates of Sequential keeps a generator"):
        deep_copy(module)
