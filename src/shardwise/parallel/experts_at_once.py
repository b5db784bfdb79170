"""Rows of shared experts exchanged among all of their ranks at once: a token is sent once for each of its experts.

Rows are sent sorted by expert, so by rank. Those that arrive go to the place that they have among the rows of this
rank's experts: by expert, then by who has sent them. What experts make of them goes back the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.experts import RowExchange, exchange_counts
from shardwise.collectives.names import CollectiveName, group_name
from shardwise.kernels.experts import add_rows, blank_sums, in_wide_dtype, sum_rows
from shardwise.parallel.kept_routes import KeptRows

FAKE = "fake"  # the backend of a traced job


@dataclass(frozen=True)
class DirectRoutes:
    """The ways of this rank's tokens to the ranks of their experts, and of all ranks' tokens to its own.

    Attributes:
        exchange: of the rows.
        order: which of the tokens' [T * k] choices each row is that is sent.
        token: the token of each.
        counts: [experts of this rank], rows of each.
        places: where the rows that arrive go.
        kept: what the exchanges gave, for a recomputation.
    """

    exchange: RowExchange
    order: Tensor
    token: Tensor
    counts: Tensor
    places: Tensor
    kept: KeptRows

    @classmethod
    def of(cls, unit: str, group: dist.ProcessGroup, number: int, experts: Tensor, kept: KeptRows) -> DirectRoutes:
        """Agree on the numbers of rows. Collective over `group`.

        Args:
            unit: name of the module, for messages.
            group: the ranks that share the experts.
            number: experts of all of them.
            experts: [T, k], numbers of the experts of each token.
            kept: keeps what the exchanges give.
        """
        name = CollectiveName(unit, group_name(group), "all_to_all_single")
        counts = torch.bincount(experts.flatten(), minlength=number)
        received = exchange_counts(counts, group, name)
        sent = counts.view(group.size(), -1).sum(1)
        sizes = torch.stack([sent, received.sum(1)]).tolist()  # the host waits for the device once
        return cls._of(RowExchange(group, name, *sizes), received, experts, kept)

    @classmethod
    def even(cls, unit: str, group: dist.ProcessGroup, number: int, experts: Tensor, kept: KeptRows) -> DirectRoutes:
        """Return those of a traced job, which knows no routes: each expert gets as many rows.

        They are agreed on as `of` does it, so that the trace sees its call and its wait.
        """
        rows, ranks = experts.numel(), group.size()
        sizes = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
        name = CollectiveName(unit, group_name(group), "all_to_all_single")
        counts = torch.full((number,), rows // number, device=experts.device)
        received = exchange_counts(counts, group, name)
        torch.stack([counts.view(ranks, -1).sum(1), received.sum(1)]).tolist()
        return cls._of(RowExchange(group, name, sizes, sizes), received, experts, kept)

    @classmethod
    def _of(cls, exchange: RowExchange, counts: Tensor, experts: Tensor, kept: KeptRows) -> DirectRoutes:
        """Return the routes of an exchange to which each rank sends `counts` [ranks, experts of this rank] rows."""
        ranks, local = counts.shape
        numbers = torch.arange(local, device=experts.device).repeat(ranks)
        arrived = numbers.repeat_interleave(counts.flatten(), output_size=sum(exchange.received)).argsort(stable=True)
        places = torch.empty_like(arrived)
        places[arrived] = torch.arange(len(arrived), device=arrived.device)
        order = experts.flatten().argsort(stable=True)
        return cls(exchange, order, order // experts.shape[1], counts.sum(0), places, kept)


def dispatch_at_once(routes: DirectRoutes, hidden: Tensor) -> Tensor:
    """Return the rows [R, H] of this rank's experts, by expert, of tokens [T, H]. Differentiable, collective."""
    rows: Tensor = _Dispatch.apply(hidden, routes)
    return rows


def combine_at_once(routes: DirectRoutes, outputs: Tensor, weights: Tensor) -> Tensor:
    """Return each token's sum [T, H] of what experts made of its rows, times `weights` [T, k].

    Differentiable, collective.
    """
    returned: Tensor = _Return.apply(outputs, routes)
    return sum_rows(returned, routes.token, len(weights), weights.flatten()[routes.order])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routes: DirectRoutes) -> Tensor:
        ctx.routes, ctx.tokens = routes, len(hidden)
        return routes.kept.result("rows", lambda: routes.exchange.exchange(hidden, routes.token, routes.places))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        back = ctx.routes.exchange.reversed.exchange(gradients[0], ctx.routes.places)
        return add_rows(blank_sums(back, ctx.tokens), in_wide_dtype(back), ctx.routes.token).to(back.dtype), None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, routes: DirectRoutes) -> Tensor:
        ctx.routes = routes
        return routes.kept.result("returned", lambda: routes.exchange.reversed.exchange(outputs, routes.places))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.routes.exchange.exchange(gradients[0], None, ctx.routes.places), None
