"""What a user's code keeps in globals, classes and attributes is as before after a forward was tried."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwise.model.user_state import mentions, numbers_kept, tensors_in, user_namespaces, user_state_kept


class Registry(OrderedDict[str, int]):
    """Has a constructor of its own, so that `copy` fails, and makes values when asked."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__({name: count})

    def values(self) -> Any:
        raise NotImplementedError


KEPT: list[int] = [1]
BY_NAME: dict[str, int] = {"calls": 0}
LOSSES: list[Tensor] = []
COUNT = 0


@functools.lru_cache
def doubled(number: int) -> int:
    return 2 * number


class Counting(nn.Module):
    calls: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.own: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        Counting.calls += 1
        KEPT.append(2)
        BY_NAME["calls"] += doubled(1)
        self.own.append(3)
        self.last = 4
        y: Tensor = self.layer(x)
        LOSSES.append(y.sum())
        return y


class Writing(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.zero_()
        return x


def counting_hook() -> tuple[Callable[[Tensor], Tensor], Callable[[], int]]:
    calls = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient

    return hook, lambda: calls


def test_what_a_trial_changes_is_put_back() -> None:
    module, (hook, calls) = Counting(), counting_hook()
    with user_state_kept(module, [hook]):
        module(torch.ones(1, 2))
        hook(torch.ones(1))
        assert (COUNT, Counting.calls, KEPT, BY_NAME, module.own, calls()) == (1, 1, [1, 2], {"calls": 2}, [3], 1)
    assert (COUNT, Counting.calls, KEPT, BY_NAME, module.own, calls()) == (0, 0, [1], {"calls": 0}, [], 0)
    assert not hasattr(module, "last")
    assert not LOSSES
    assert doubled.cache_info().currsize == 0


def test_a_dictionary_that_cannot_copy_itself_is_put_back() -> None:
    module: Any = type("Holding", (nn.Module,), {"__module__": __name__})()
    module.registry = Registry("calls", 0)
    with user_state_kept(module):
        module.registry["calls"] = 1
    assert list(dict.items(module.registry)) == [("calls", 0)]


def test_a_layer_of_torch_keeps_nothing() -> None:
    assert user_namespaces(nn.Sequential(nn.Linear(2, 2)).modules()) == []


def test_tensors_with_gradients_are_found_where_they_lie() -> None:
    module = Counting()
    with user_state_kept(module):
        module(torch.ones(1, 2))
        assert list(tensors_in(user_namespaces(module.modules())).values()) == [f"LOSSES of {__name__}"]


def test_numbers_are_named_by_where_they_are() -> None:
    module = nn.Sequential(Counting())
    with user_state_kept(module):
        before = numbers_kept(module)
        module(torch.ones(1, 2))
        changed = {name for name, number in numbers_kept(module).items() if before.get(name) != number}
    of_file = {f"{name} of {__name__}" for name in ("COUNT", "KEPT", "BY_NAME")}
    assert changed == {"0.last of Sequential", "0.own of Sequential", "calls of Counting", *of_file}


def test_an_attribute_that_the_code_mentions_is_found() -> None:
    assert mentions(Writing(), "data")
    assert not mentions(Writing(), "grad")
