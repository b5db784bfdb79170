"""Code that changes whether parameters are trained is noticed; what changes nothing is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from shardwise.model.own_gradients import freezing_recorded


def set_attribute(layer: nn.Linear, value: bool) -> None:
    layer.weight.requires_grad = value


def call_on_tensor(layer: nn.Linear, value: bool) -> None:
    layer.weight.requires_grad_(value)


def call_on_module(layer: nn.Linear, value: bool) -> None:
    layer.requires_grad_(value)


@pytest.mark.parametrize("way", [set_attribute, call_on_tensor, call_on_module])
def test_a_change_alone_is_noticed(way: Callable[[nn.Linear, bool], None]) -> None:
    layer, names = nn.Linear(2, 2), list[str]()
    with freezing_recorded(names):
        way(layer, True)
        assert not names
        way(layer, False)
    assert names and not layer.weight.requires_grad
