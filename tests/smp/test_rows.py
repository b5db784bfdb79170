"""Batches of tensor ranks that each read their own: merged, taken apart, and backward put together again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.job.axes import Axis
from shardwise.parallel.layout import Layout
from shardwise.smp.v1.rows import merge_rows, narrow_rows
from shardwise.testing.world import WorldPool

ROWS = 3


def rows_of(rank: int) -> Tensor:
    return torch.arange(ROWS * 2, dtype=torch.float64).view(ROWS, 2) + 100 * rank


def merged_and_taken_apart() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = Layout({Axis.TENSOR: size}, rank=rank)
    inputs: dict[str, Any] = {"rows": rows_of(rank), "nested": [rows_of(rank) * 2], "scale": torch.tensor(2.0), "n": 3}
    merged = merge_rows(inputs, layout)
    whole = torch.cat([rows_of(other) for other in range(size)])
    assert torch.equal(merged["rows"], whole) and torch.equal(merged["nested"][0], 2 * whole)
    assert merged["scale"] is inputs["scale"] and merged["n"] == 3
    values = whole.clone().requires_grad_()
    mean = values.mean()
    own, scalar, count = narrow_rows((values.square(), mean, torch.tensor(7)), ROWS, layout)
    assert torch.equal(own, rows_of(rank).square()) and scalar == mean and count == 7
    (own.sum() * (rank + 1) + scalar).backward()
    expected = torch.cat([2 * rows_of(other) * (other + 1) for other in range(size)]) + size / values.numel()
    torch.testing.assert_close(values.grad, expected, rtol=1e-12, atol=0)
    alone = Layout({Axis.TENSOR: 1, Axis.SHARD: size}, rank=rank)
    assert merge_rows(inputs, alone) is inputs


def test_rows_of_tensor_ranks_are_merged_and_taken_apart(world_pool: WorldPool) -> None:
    world_pool.run(2, merged_and_taken_apart)
