"""The autograd collective of expert parallelism: rows exchanged among ranks in numbers that differ by pair of ranks.

Backward sends each row's gradient the way back. A rank that gets or sends no row takes part all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.groups import row_engine
from shardwise.collectives.names import CollectiveName, NamedWork


class Arriving(NamedTuple):
    """Rows on their way: their memory, and the work that is done when they have come."""

    rows: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """Return the rows once they are here."""
        self.work.wait()
        return self.rows


class RowPlaces(NamedTuple):
    """A tensor, and the numbers of its rows that others are copied to."""

    rows: Tensor
    places: Tensor


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

    def exchange(self, rows: Tensor, taken: Tensor | None = None, into: RowPlaces | None = None) -> Tensor:
        """Return the received rows, or the tensor `into` which they were put, without autograd. Collective.

        Args:
            rows: those that are sent, or of which those `taken` [sum(sent)] are.
            taken: numbers of rows.
            into: where the received rows go.
        """
        engine, rows = row_engine(self.group, rows), rows.contiguous()
        received, places = into or (self._room(rows), None)
        if engine is not None:
            with self.name:
                engine.exchange_rows(received, places, self.received, rows, taken, self.sent, False).wait()
            return received
        arriving = self._start(rows, taken).wait()
        return arriving if into is None else into.rows.index_copy_(0, into.places, arriving)

    def start(self, rows: Tensor, taken: Tensor | None = None) -> Arriving:
        """Send `rows`, or those `taken` of them, while the caller goes on, without autograd. Collective."""
        engine, rows = row_engine(self.group, rows), rows.contiguous()
        if engine is None:
            return self._start(rows, taken)
        received = self._room(rows)
        with self.name:
            work = engine.exchange_rows(received, None, self.received, rows, taken, self.sent, True)
        return Arriving(received, NamedWork(self.name, work))

    def _start(self, rows: Tensor, taken: Tensor | None) -> Arriving:
        sent, received = rows if taken is None else rows.index_select(0, taken), self._room(rows)
        with self.name:
            work = dist.all_to_all_single(received, sent, self.received, self.sent, self.group, async_op=True)
        return Arriving(received, NamedWork(self.name, work))

    def _room(self, rows: Tensor) -> Tensor:
        return rows.new_empty(sum(self.received), *rows.shape[1:])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.exchange(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.reversed.exchange(gradients[0]), None


def exchange_counts(counts: Tensor, group: dist.ProcessGroup, name: CollectiveName) -> Tensor:
    """Return [ranks, n] counts that every rank of `group` has for this one, of [ranks * n] for all. Collective."""
    received = torch.empty_like(counts)
    with name:
        dist.all_to_all_single(received, counts, group=group)
    return received.view(group.size(), -1)
