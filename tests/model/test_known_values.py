"""Fake tensors that follow from the code alone have values, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise._torch_compat.tracing import FakeTensorMode, asks_for_values
from shardwise.model.known_values import KnownValues

INPUTS = 5  # rows


@pytest.fixture
def batch() -> Iterator[Tensor]:
    """What a forward is given: it has no values."""
    with FakeTensorMode():
        given = torch.zeros(INPUTS, 3)
        with KnownValues():
            yield given


@pytest.fixture
def assuming() -> Iterator[Tensor]:
    """The same, where conditions on it hold everywhere and the first of its rows is told."""
    with FakeTensorMode():
        given, told = torch.zeros(INPUTS, 3), torch.zeros(2, dtype=torch.long)
        with KnownValues(assumes=True) as known:
            known.assume(told, lambda: torch.tensor([7, 8]))
            given.told = told  # type: ignore[attr-defined]
            yield given


def doubled(values: Tensor, times: int) -> Tensor:
    for _ in range(times):
        values = values + values
    return values


def filled(mask: Tensor, value: Any) -> Tensor:
    mask[mask > 0] = value
    return mask


def filled_by_a_view(mask: Tensor, value: Any) -> Tensor:
    view = mask[1:]
    view[0] = value
    return mask


def shown_by_a_view(mask: Tensor) -> Tensor:
    view = mask[1:]
    mask[2] = 7.0
    return view


KNOWN: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "a mask of ones": (lambda x: (torch.ones(x.shape) > 0).all().item(), True),
    "as large as the batch": (lambda x: (torch.ones_like(x) < 0).any().item(), False),
    "new": (lambda x: x.new_full((2,), 7.0).sum().item(), 14.0),
    "a range": (lambda x: int(torch.arange(x.shape[0]).max()), INPUTS - 1),
    "numbers of the code": (lambda x: torch.tensor([4, 2]).tolist(), [4, 2]),
    "one of two outputs": (lambda x: torch.arange(6).view(2, 3).max(dim=1)[1].tolist(), [2, 2]),
    "written in place": (lambda x: filled(torch.ones(INPUTS), 2.0).sum().item(), 2.0 * INPUTS),
    "written by a view": (lambda x: filled_by_a_view(torch.ones(INPUTS), 2.0).tolist(), [1.0, 2.0, 1.0, 1.0, 1.0]),
    "written by a view of a view": (lambda x: filled_by_a_view(torch.ones(2, 3).view(6)[1:], 2.0).sum().item(), 6.0),
    "a list of tensors": (lambda x: torch.tensor([torch.arange(3).max(), 7]).tolist(), [2, 7]),
    "used twice at each of many levels": (lambda x: doubled(torch.ones(2), 40).max().item(), 2.0**40),
    "a condition": (lambda x: bool((torch.arange(3) == 2).any()), True),
    "places": (lambda x: torch.arange(4)[torch.arange(4) > 1].tolist(), [2, 3]),
    "the shape of places": (lambda x: tuple((torch.arange(4) > 0).nonzero().shape), (3, 1)),
}
UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "the batch": lambda x: x.sum().item(),
    "with the batch": lambda x: (torch.ones_like(x) * x).sum().item(),
    "random numbers": lambda x: torch.rand(2).sum().item(),
    "memory that nothing fills": lambda x: torch.empty(2).sum().item(),
    "written by the batch": lambda x: filled(torch.ones(INPUTS), x[0, 0]).sum().item(),
    "random numbers in place": lambda x: torch.ones(INPUTS).uniform_().sum().item(),
    "written by a view of the batch": lambda x: filled_by_a_view(torch.ones(INPUTS), x[0, 0]).sum().item(),
    "a view of what was written": lambda x: shown_by_a_view(torch.ones(INPUTS)).sum().item(),
    "places in the batch": lambda x: x.nonzero().shape[0] + 0,
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_follows_from_the_code_alone_is_answered(batch: Tensor, name: str) -> None:
    ask, answer = KNOWN[name]
    assert ask(batch) == answer


EVERYWHERE: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "places": (lambda x: (x > 0).nonzero()[-1].tolist(), [INPUTS - 1, 2]),
    "places by dim": (lambda x: [place.shape for place in torch.where(x[0] > 0)], [(3,)]),
    "masked": (lambda x: x.masked_select(x > 0).shape, (3 * INPUTS,)),
    "masked by another shape": (lambda x: x.masked_select(x[:, :1] > 0).shape, (3 * INPUTS,)),
    "a mask as an index": (lambda x: x[x[:, 0] > 0].shape, (INPUTS, 3)),
    "a mask behind all rows": (lambda x: x[:, x[0] > 0].shape, (INPUTS, 3)),
    "a loop over places": (lambda x: [int(place) for place in (x[0] > 0).nonzero()], [0, 1, 2]),
    "places of what was told": (lambda x: x[:2][x.told > 7].shape, (1, 3)),
    "what was told": (lambda x: (x.told + 1).tolist(), [8, 9]),
    "a choice by what was told": (lambda x: bool((x.told == 8).any()), True),
    "experts by turns": (lambda x: x.topk(2).indices.tolist(), [[0, 1], [2, 0], [1, 2], [0, 1], [2, 0]]),
    "tokens of experts": (lambda x: torch.bincount(x.topk(2, dim=1)[1].flatten()).tolist(), [4, 3, 3]),
    "a class more than there are experts": (
        lambda x: torch.nn.functional.one_hot(x.topk(2)[1], 4).sum((0, 1)).nonzero().flatten().tolist(),
        [0, 1, 2],
    ),
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_unknown_conditions_hold_everywhere_where_that_is_assumed(assuming: Tensor, name: str) -> None:
    ask, answer = EVERYWHERE[name]
    assert ask(assuming) == answer


def test_other_values_stay_unknown_then(assuming: Tensor) -> None:
    for ask in (
        lambda: assuming.sum().item(),
        lambda: assuming.unique_consecutive().shape,
        lambda: bool(assuming.any()),
        lambda: assuming.topk(2, dim=0).indices.tolist(),  # no choice for each row
        lambda: assuming[:1].topk(2).indices.tolist(),  # of which one column would never be
        lambda: assuming.topk(2).values.tolist(),
    ):
        with pytest.raises(Exception) as error:
            ask()
        assert asks_for_values(error.value)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_follows_from_more_is_not(batch: Tensor, name: str) -> None:
    with pytest.raises(Exception) as error:
        UNKNOWN[name](batch)
    assert asks_for_values(error.value)
