"""Rows of shared experts between hosts, in parts: while one crosses the network, others are copied inside of hosts.

A token goes once to each host that has some of its experts, with their numbers and weights, to the rank of its sender's
local index. The ranks of that host share the experts among themselves, and what comes back is the sum of that host's
experts. So the network carries a token once a host and not once an expert.

A part is a range of the sender's tokens: what comes back of them is in one part too. Where a row goes and in which
order rows are summed does not depend on parts, so neither do numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.experts import Arriving, RowExchange, exchange_counts
from shardwise.collectives.names import CollectiveName, group_name
from shardwise.kernels.experts import add_rows, blank_sums, in_wide_dtype, select_rows
from shardwise.parallel.kept_routes import KeptRows

PARTS = 16  # of a rank's tokens, at most
AHEAD = 6  # parts under way: more take memory, fewer leave the network idle while rows are copied
PART_BYTES = 256 << 10  # of tokens in a part, at least: below, one more exchange costs more than it hides


class HostRoutes:
    """The ways of this rank's tokens to all hosts and back, and of other hosts' tokens through this rank.

    Rows that cross lie by host, of a host by part.

    Attributes:
        token: [n], the token of each row that this rank sends.
        token_of: the same by part.
        is_there: [n, k], which of the token's experts are on the host that the row goes to.
        numbers: [n, k], their numbers on that host; `of_host` for the others.
        inside: the ways inside of this host, known once `numbers` of all hosts have come.
        weights_there: [n * k], of the rows that come from all hosts, known then too.
        kept: what the exchanges gave, for a recomputation.
    """

    inside: InsideRoutes
    weights_there: Tensor

    def __init__(
        self,
        unit: str,
        cross: dist.ProcessGroup,
        number: int,
        experts: Tensor,
        row_bytes: int,
        kept: KeptRows,
    ) -> None:
        """Agree on the numbers of rows. Collective over `cross`.

        Args:
            unit: name of the module, for messages.
            cross: the ranks of this local index on all hosts.
            number: experts of all hosts.
            experts: [T, k], numbers of the experts of each token.
            row_bytes: of a token.
            kept: keeps what the exchanges give.
        """
        self.kept, self._knows_inside = kept, False
        self.cross, self.hosts, self.of_host = cross, cross.size(), number // cross.size()
        self.name = CollectiveName(unit, group_name(cross), "all_to_all_single")
        self.tokens, device = len(experts), experts.device
        host_of = experts // self.of_host
        goes = torch.zeros(self.hosts, self.tokens, dtype=torch.int64, device=device).scatter_(0, host_of.T, 1)
        host, self.token = goes.nonzero(as_tuple=True)
        self.is_there = host_of[self.token] == host[:, None]
        own = experts[self.token] - self.of_host * host[:, None]
        self.numbers = torch.where(self.is_there, own, self.of_host).to(torch.int32)

        parts = max(1, min(PARTS, self.tokens * row_bytes // PART_BYTES))
        part_of = torch.arange(self.tokens, device=device) * parts // max(1, self.tokens)
        by_part = self.token[part_of[self.token].argsort(stable=True)]
        told = goes.new_full((self.hosts, PARTS + 1), parts)
        told[:, :PARTS] = goes.new_zeros(self.hosts, PARTS).index_add_(1, part_of, goes)
        heard = exchange_counts(told.flatten(), cross, self.name)
        sent, received = torch.stack([told, heard]).tolist()  # the host waits for the device once
        self.rounds = max(row.pop() for row in received)
        self.sent, self.received = [row[:PARTS] for row in sent], received
        self.token_of = by_part.split([sum(row[part] for row in sent) for part in range(PARTS)])

    @property
    def whole(self) -> RowExchange:
        """The exchange of all rows at once."""
        return RowExchange(self.cross, self.name, [sum(row) for row in self.sent], [sum(row) for row in self.received])

    def part(self, part: int) -> RowExchange:
        """Return the exchange of the rows of a part."""
        sent, received = ([row[part] for row in rows] for rows in (self.sent, self.received))
        return RowExchange(self.cross, self.name, sent, received)

    # --- rows on their way; all without autograd, and collective over `cross` and the host's ranks

    def send(self, values: Tensor) -> Iterator[Tensor]:
        """Start to send rows of `values` [T, H], and return what comes from all hosts, part after part."""
        values = values.contiguous()
        starts = (self.part(part).start(values, self.token_of[part]) for part in range(self.rounds))
        going = deque(islice(starts, AHEAD))

        def received() -> Iterator[Tensor]:
            while going:
                first = going.popleft()
                going.extend(islice(starts, 1))
                yield first.wait()

        return received()

    def spread(self, coming: Iterator[Tensor], like: Tensor, weighting: Weighting | None = None) -> Tensor:
        """Return the rows [R, H] of this rank's experts, by expert, of what comes of tokens `like` [T, H]."""
        inside = self.inside
        rows = like.new_empty(inside.rows, like.shape[1])
        for part, places in enumerate(inside.places):
            came, taken = next(coming, rows[:0]), inside.lines[part]
            if weighting is not None:
                came, taken = weighting.of_gradient(part, inside.slots[part], came.index_select(0, taken)), None
            inside.exchange(part).exchange(came, taken, places, rows)
        return rows

    def dispatch(self, hidden: Tensor, weights: Tensor, local: dist.ProcessGroup) -> Tensor:
        """Return the rows [R, H] of this rank's experts; the first time the ways inside of the host become known."""
        if self._knows_inside:
            return self.spread(self.send(hidden), hidden)
        numbers = self.whole.start(self.numbers)
        coming = self.send(hidden)
        weights_there = self.whole.start(weights)
        self.inside = InsideRoutes(self, numbers.wait(), local)
        rows = self.spread(coming, hidden)
        self.weights_there, self._knows_inside = weights_there.wait(), True
        return rows

    def combine(self, rows: Tensor, weighting: Weighting | None = None) -> Tensor:
        """Return [T, H], the sums of what this rank's and other experts make of its tokens, of `rows` by expert."""
        inside, going = self.inside, deque[tuple[int, Arriving]]()
        total = blank_sums(rows, self.tokens)

        def add(part: int, arriving: Arriving) -> None:
            add_rows(total, in_wide_dtype(arriving.wait()), self.token_of[part])

        for part, places in enumerate(inside.places):
            returned = inside.exchange(part).reversed.exchange(rows, places)
            weighted = in_wide_dtype(returned) if weighting is None else weighting.of_rows(inside.slots[part], returned)
            if part >= self.rounds:
                continue  # the host's other ranks have more parts
            back = self.part(part).reversed
            sums = add_rows(blank_sums(rows, sum(back.sent)), weighted, inside.lines[part])
            going.append((part, back.start(sums.to(rows.dtype))))
            if len(going) > AHEAD:
                add(*going.popleft())
        for arriving in going:
            add(*arriving)
        return total.to(rows.dtype)


class InsideRoutes:
    """The ways of other hosts' tokens from this rank to the ranks of its host, and of theirs to this rank's experts.

    Attributes:
        slots: of each part, the places in `numbers` that rows are sent for, by expert.
        lines: of each part, the row of each of them among those that have come of that part.
        places: of each part, where the rows that arrive go: by expert, by who sends them inside of the host, in order.
        counts: [experts of this rank], rows of each.
        rows: of all of them.
    """

    def __init__(self, routes: HostRoutes, numbers: Tensor, local: dist.ProcessGroup) -> None:
        """Agree on the numbers of rows. Collective over `local`.

        Args:
            numbers: [n, k], experts of the rows that have come from all hosts.
            local: the ranks of this host.
        """
        self.local, self.name = local, CollectiveName(routes.name.unit, group_name(local), routes.name.operation)
        device, of_host, ranks = numbers.device, routes.of_host, local.size()
        received = torch.tensor(routes.received, device=device)
        # host * PARTS + part, of each row that has come
        cell = torch.arange(received.numel(), device=device).repeat_interleave(received.flatten())
        flat = numbers.flatten().to(torch.int64)
        slots = (flat < of_host).nonzero().squeeze(1)
        row = slots // numbers.shape[1]
        order = (cell[row] % PARTS * of_host + flat[slots]).argsort(stable=True)
        kinds = torch.bincount(cell[row] * of_host + flat[slots], minlength=received.numel() * of_host)
        sent = kinds.view(routes.hosts, PARTS, ranks, -1)
        told = torch.cat([sent.permute(2, 0, 1, 3).flatten(1), sent.new_full((ranks, 1), routes.rounds)], 1)
        heard = exchange_counts(told.flatten(), local, self.name)
        came = heard[:, :-1].unflatten(1, (routes.hosts, PARTS, -1))  # by sender, host, part and expert
        numbers_of = torch.cat([sent.sum((0, 3)).flatten(), came.sum((1, 3)).T.flatten(), heard[:, -1].max()[None]])
        *sizes, rounds = numbers_of.tolist()  # the host waits for the device once
        self.sent, self.received = (
            [sizes[first + part * ranks : first + (part + 1) * ranks] for part in range(rounds)]
            for first in (0, PARTS * ranks)
        )
        self.counts, self.rows = came.sum((0, 1, 2)), sum(map(sum, self.received))
        self.slots = slots[order].split([sum(counts) for counts in self.sent])
        self.lines = _lines(cell, received)[row[order]].split([sum(counts) for counts in self.sent])
        self.places = _places(came, self.rows).split([sum(counts) for counts in self.received])

    def exchange(self, part: int) -> RowExchange:
        """Return the exchange of the rows of a part."""
        return RowExchange(self.local, self.name, self.sent[part], self.received[part])


def _lines(cell: Tensor, counts: Tensor) -> Tensor:
    """Return the place of each row among those of its part, of rows by host and part, `counts` [hosts, parts]."""
    before = counts.cumsum(0) - counts  # of hosts before, in the same part
    starts = counts.flatten().cumsum(0) - counts.flatten()
    return torch.arange(len(cell), device=cell.device) + (before.flatten() - starts)[cell]


def _places(came: Tensor, rows: int) -> Tensor:
    """Return the place by expert, sender, host and part, of rows that come by part, sender, expert and host.

    Args:
        came: [senders, hosts, parts, experts], numbers of rows.
        rows: the sum of them.
    """
    by_place = came.permute(3, 0, 1, 2)
    starts = (by_place.flatten().cumsum(0) - by_place.flatten()).view(by_place.shape)
    runs, starts = came.permute(2, 0, 3, 1).flatten(), starts.permute(3, 1, 0, 2).flatten()
    before = runs.cumsum(0) - runs
    return torch.arange(rows, device=came.device) + (starts - before).repeat_interleave(runs, output_size=rows)


class Weighting:
    """Routing weights applied where a token's rows of a host come together, and what their gradient needs.

    Attributes:
        weights: [n * k], of the rows that came from all hosts.
        returned: of each part, what experts made of its rows; for the gradient.
        keep: rows that come back are kept there.
        gradient: of `weights`, [n * k].
    """

    def __init__(self, weights: Tensor, returned: Sequence[Tensor] = (), keep: bool = False) -> None:
        self.weights, self.returned, self.keep = weights, list(returned), keep
        self.gradient = torch.zeros_like(weights)

    def of_rows(self, slots: Tensor, returned: Tensor) -> Tensor:
        """Return the rows of a part times their weights, in fp32 or wider."""
        if self.keep:
            self.returned.append(returned)
        return in_wide_dtype(returned) * self.weights[slots][:, None]

    def of_gradient(self, part: int, slots: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of a part's rows, of that of their sums; and note that of their weights."""
        wide = in_wide_dtype(gradient)
        self.gradient[slots] = torch.linalg.vecdot(in_wide_dtype(self.returned[part]), wide).to(self.gradient.dtype)
        return (wide * self.weights[slots][:, None]).to(gradient.dtype)


class _Dispatch(torch.autograd.Function):
    """Tokens [T, H] and weights [n, k] to the rows of this rank's experts, and weights of rows from all hosts."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, routes: HostRoutes, local: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.routes = routes
        rows = routes.kept.result("rows", lambda: routes.dispatch(hidden, weights, local))
        return rows, routes.weights_there.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_weights = ctx.routes.whole.reversed.start(gradients[1])
        return ctx.routes.combine(gradients[0].contiguous()), of_weights.wait(), None, None


class _Combine(torch.autograd.Function):
    """The outputs of this rank's experts, and the weights of rows from all hosts, to sums of tokens [T, H]."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, routes: HostRoutes) -> Tensor:
        weighting = Weighting(weights.flatten(), keep=any(ctx.needs_input_grad))
        sums, *returned = routes.kept.results("sums", lambda: [routes.combine(outputs, weighting), *weighting.returned])
        ctx.routes = routes
        ctx.save_for_backward(weights, *returned)
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, *returned = ctx.saved_tensors
        weighting = Weighting(weights.flatten(), returned)
        rows = ctx.routes.spread(ctx.routes.send(gradients[0]), gradients[0], weighting)
        return rows, weighting.gradient.view_as(weights), None


def dispatch(routes: HostRoutes, local: dist.ProcessGroup, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows [R, H] of this rank's experts, by expert (`routes.inside.counts`), and the weights for `combine`.

    Differentiable. Collective over `routes.cross` and `local`, the ranks of this host.

    Args:
        hidden: tokens [T, H].
        weights: [T, k], of their experts.
    """
    rows, weights_there = _Dispatch.apply(hidden, select_rows(weights, routes.token) * routes.is_there, routes, local)
    return rows, weights_there


def combine(routes: HostRoutes, outputs: Tensor, weights: Tensor) -> Tensor:
    """Return each token's weighted sum [T, H] of what experts made of its rows. Differentiable, collective."""
    sums: Tensor = _Combine.apply(outputs, weights, routes)
    return sums
