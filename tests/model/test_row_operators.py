"""Which of torch's operators keep the rows of a part of a sequence apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.row_operators import MixedRowsError, RowsApart

ROWS = 7
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "projection": lambda x: F.linear(x, x.new_empty(8, 4)),
    "norm": lambda x: F.layer_norm(x, (4,)) + F.rms_norm(x, (4,)),
    "softmax of features": lambda x: x.softmax(-1).topk(2, dim=-1).values,
    "heads": lambda x: x.view(2, ROWS, 2, 2).transpose(1, 2),
    "all rows in a batch": lambda x: F.linear(x.reshape(-1, 4), x.new_empty(8, 4)).view(2, ROWS, 8),
    "all keys": lambda x: (x @ x.new_empty(2, 4, 13)).softmax(-1) @ x.new_empty(2, 13, 4),
    "dropout": lambda x: F.dropout(x, 0.5),
    "a constant": lambda x: x + x.new_ones(2, ROWS, 1),
}
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "scores": lambda x: x @ x.mT,
    "sum": lambda x: x.sum(1),
    "mean of all": lambda x: x - x.mean(),
    "softmax": lambda x: x.softmax(1),
    "convolution": lambda x: F.conv1d(x.mT, x.new_empty(4, 4, 1)),
    "scan": lambda x: x.cumsum(1),
    "shift": lambda x: F.pad(x, (0, 0, 1, -1)),
    "a part of the rows": lambda x: x[:, 1:],
    "numbers of positions": lambda x: x + torch.arange(x.shape[1], device=x.device)[:, None],
    "the first of a table": lambda x: x + x.new_empty(16, 4)[: x.shape[1]],
    "other order": lambda x: x.view(ROWS, 2, 4),
    "dropout of probabilities": lambda x: F.dropout(x.view(2, ROWS, 2, 2).transpose(1, 2), 0.5),
}


def run(function: Callable[[Tensor], Tensor], rows: int = ROWS) -> RowsApart:
    apart = RowsApart([rows])
    with torch.no_grad(), apart:
        function(torch.empty(2, rows, 4, device="meta"))
    return apart


@pytest.mark.parametrize("name", APART)
def test_kept_apart(name: str) -> None:
    run(APART[name])


@pytest.mark.parametrize("name", MIXED)
def test_mixed(name: str) -> None:
    with pytest.raises(MixedRowsError):
        run(MIXED[name])


def test_numbers_that_follow_from_the_length() -> None:
    scaled: Callable[[Tensor], Tensor] = lambda x: x * 2.0 / x.shape[1]  # noqa: E731
    assert run(scaled, 7).numbers != run(scaled, 11).numbers
    assert run(lambda x: x * 2.0, 7).numbers == run(lambda x: x * 2.0, 11).numbers
