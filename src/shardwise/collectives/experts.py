"""The collective of expert parallelism: rows exchanged among ranks in numbers that differ by pair of ranks.

A rank that gets or sends no row takes part all the same. The engine takes rows from where they lie, and puts them where
they go, without a copy of them in between. Nothing here is autograd's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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

    def exchange(
        self, rows: Tensor, taken: Tensor | None = None, places: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the received rows. Collective.

        Args:
            rows: those that are sent, or of which those `taken` are.
            taken: [sum(sent)], numbers of rows.
            places: [sum(received)], where the received rows go in `out`; in their order if it is left out.
            out: that has more rows than come here; it is returned.
        """
        if out is None:
            out = self._room(rows)
        engine, rows = row_engine(self.group, rows), rows.contiguous()
        if engine is not None:
            with self.name:
                engine.exchange_rows(out, places, self.received, rows, taken, self.sent, False).wait()
            return out
        if places is None:
            return self._start(rows, taken, out).wait()
        return out.index_copy_(0, places, self._start(rows, taken, self._room(rows)).wait())

    def start(self, rows: Tensor, taken: Tensor | None = None) -> Arriving:
        """Send `rows`, or those `taken` of them, while the caller goes on. Collective."""
        engine, rows, received = row_engine(self.group, rows), rows.contiguous(), self._room(rows)
        if engine is None:
            return self._start(rows, taken, received)
        with self.name:
            work = engine.exchange_rows(received, None, self.received, rows, taken, self.sent, True)
        return Arriving(received, NamedWork(self.name, work))

    def _start(self, rows: Tensor, taken: Tensor | None, received: Tensor) -> Arriving:
        sent = rows if taken is None else rows.index_select(0, taken)
        with self.name:
            work = dist.all_to_all_single(received, sent, self.received, self.sent, self.group, async_op=True)
        assert work is not None  # as it is for ranks outside of the group
        return Arriving(received, NamedWork(self.name, work))

    def _room(self, rows: Tensor) -> Tensor:
        return rows.new_empty(sum(self.received), *rows.shape[1:])


def exchange_counts(counts: Tensor, group: dist.ProcessGroup, name: CollectiveName) -> Tensor:
    """Return [ranks, n] counts that every rank of `group` has for this one, of [ranks * n] for all. Collective."""
    received = torch.empty_like(counts)
    with name:
        dist.all_to_all_single(received, counts, group=group)
    return received.view(group.size(), -1)
