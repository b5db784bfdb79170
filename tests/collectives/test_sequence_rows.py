"""Positions of tensor ranks, brought together for a reduce-scatter: of one sample in even runs without a copy."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shardwise.collectives.tensor import _by_rank


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sizes", [[3, 3], [2, 3]])
def test_positions_by_rank(batch: int, sizes: list[int]) -> None:
    values = torch.randn(batch, sum(sizes), 4)
    by_rank, most = _by_rank(values, sizes), max(sizes)
    assert by_rank.is_contiguous() and by_rank.shape == (2, batch, most, 4)
    for part, own in zip(by_rank, values.split(sizes, 1), strict=True):
        assert torch.equal(part, functional.pad(own, (0, 0, 0, most - own.shape[1])))
    is_copy = by_rank.data_ptr() != values.data_ptr()
    assert is_copy == (batch > 1 or min(sizes) < most)
