"""The autograd collective of expert parallelism: rows exchanged among ranks in numbers that differ by pair of ranks.

Backward sends each row's gradient the way back. A rank that gets or sends no row takes part all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.names import CollectiveName


@dataclass(frozen=True)
class RowExchange:
    """The numbers of rows that this rank sends to, and receives from, each rank of `group`, in the group's order."""

    group: dist.ProcessGroup
    name: CollectiveName
    sent: list[int]
    received: list[int]

    @property
    def reversed(self) -> RowExchange:
        """The exchange that brings every row back."""
        return RowExchange(self.group, self.name, self.received, self.sent)

    def run(self, rows: Tensor) -> Tensor:
        """Return the received rows [sum(received), ...] for `rows` [sum(sent), ...]; differentiable. Collective."""
        exchanged: Tensor = _Exchange.apply(rows, self)
        return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return _exchanged(rows, exchange)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.exchange.reversed), None


def _exchanged(rows: Tensor, exchange: RowExchange) -> Tensor:
    received = rows.new_empty(sum(exchange.received), *rows.shape[1:])
    with exchange.name:
        dist.all_to_all_single(received, rows.contiguous(), exchange.received, exchange.sent, exchange.group)
    return received


def exchange_counts(counts: Tensor, group: dist.ProcessGroup, name: CollectiveName) -> Tensor:
    """Return [ranks, n] counts that every rank of `group` has for this one, of [ranks * n] for all. Collective."""
    received = torch.empty_like(counts)
    with name:
        dist.all_to_all_single(received, counts, group=group)
    return received.view(group.size(), -1)
