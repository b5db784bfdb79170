"""Tensors that are summed together go side by side in calls of bounded size, and large ones by themselves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.collectives import tensor as tensor_collectives
from shardwise.collectives.tensor import sum_together


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all-reduces of two ranks that hold the same."""
    sizes: list[int] = []

    def all_reduce(values: Tensor, *args: Any, group: Any) -> None:
        sizes.append(values.numel())
        values.mul_(2)

    monkeypatch.setattr(tensor_collectives, "TOGETHER", 4 * 100)
    monkeypatch.setattr(tensor_collectives, "collective_name", lambda *args: nullcontext())
    monkeypatch.setattr(tensor_collectives.dist, "all_reduce", all_reduce)
    return sizes


def test_every_tensor_is_summed_once_in_calls_of_bounded_size(calls: list[int]) -> None:
    tensors = [torch.full((size,), float(size)) for size in (60, 30, 20, 300, 1, 90)]
    tensors += [torch.full((3,), 5.0, dtype=torch.float64), torch.full((40, 5), 7.0).T]
    expected = [2 * tensor for tensor in tensors]
    sum_together(tensors, None, torch.device("cpu"), "numbers")  # type: ignore[arg-type]
    assert all(map(torch.equal, tensors, expected))
    assert calls == [90, 20, 300, 91, 200, 3]


def test_a_large_tensor_is_summed_where_it_lies(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cat", None)
    large = torch.ones(1000)
    sum_together([large], None, torch.device("cpu"), "numbers")  # type: ignore[arg-type]
    assert calls == [1000] and bool((large == 2).all())
