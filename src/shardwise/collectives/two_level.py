"""Two-level collectives over any c10d groups: between hosts among ranks of equal local index, and inside each host.

With h hosts of l ranks and M bytes of full buffer, each rank sends and receives (h-1)/h * M/l bytes between hosts; the
rest stays in its host (MiCS, arXiv 2205.00119, section 3.3, for all-gather; reduce-scatter is its mirror). The result
lies as that of the flat operation, in whatever order the group's ranks stand on the hosts.

Between hosts the group's own operation runs (a ring, say), or with `direct` every rank exchanges with each of its peers
at once: fewer rounds, and received pieces are summed in the order of the hosts. Which is better where: `choice.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.groups import (
    all_gather_coalesced,
    all_gather_whole,
    all_to_all,
    reduce_scatter_coalesced,
    reduce_scatter_whole,
)

# Over pieces stacked in dim 0. An average is a sum here, divided once at the end.
REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    dist.ReduceOp.SUM: lambda pieces, out: torch.sum(pieces, 0, out=out),
    dist.ReduceOp.PRODUCT: lambda pieces, out: torch.prod(pieces, 0, out=out),
    dist.ReduceOp.MIN: lambda pieces, out: torch.amin(pieces, 0, out=out),
    dist.ReduceOp.MAX: lambda pieces, out: torch.amax(pieces, 0, out=out),
}


def can_reduce(tensor: Tensor, reduction: Any) -> bool:
    """Return True if two levels can reduce these: floating-point tensors, and no premultiplied sum or bits."""
    return tensor.is_floating_point() and (reduction in REDUCTIONS or reduction == dist.ReduceOp.AVG)


@dataclass
class Scratch:
    """Memory that operations of a group use again and again, by use, dtype and device; it grows to the largest."""

    kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def take(self, use: str, numbers: int, like: Tensor) -> Tensor:
        """`numbers` elements [numbers] with the dtype and device of `like`; what they hold is undefined."""
        key = (use, like.dtype, like.device)
        if key not in self.kept or self.kept[key].numel() < numbers:
            self.kept[key] = torch.empty(numbers, dtype=like.dtype, device=like.device)
        return self.kept[key][:numbers]


@dataclass
class TwoLevel:
    """The two levels of one group, seen from one rank.

    Attributes:
        local: the ranks of this host.
        cross: the ranks of this local index on all hosts.
        host, index: this rank's place.
        order: group rank -> host * l + local index; what is gathered has to be put in this order.
    """

    local: dist.ProcessGroup
    cross: dist.ProcessGroup
    host: int
    index: int
    order: Sequence[int]
    scratch: Scratch = field(default_factory=Scratch)

    def __post_init__(self) -> None:
        self.hosts, self.locals = self.cross.size(), self.local.size()
        self.size = self.hosts * self.locals
        self.by_host = list(self.order) == list(range(self.size))
        self._orders: dict[torch.device, tuple[Tensor, Tensor]] = {}

    # --- the operations

    def all_gather(self, output: Tensor, piece: Tensor, direct: bool) -> None:
        """`piece` of every rank, in the order of the ranks, to `output` (n times as many elements); both contiguous."""
        rows = output.view(self.size, -1)
        target = rows if self.by_host else self.scratch.take("rows", output.numel(), output).view_as(rows)
        grid = target.view(self.hosts, self.locals, -1)
        own = grid[self.host, self.index]
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece.view(-1))
        if direct:
            column = [grid[host, self.index] for host in range(self.hosts)]
            exchange(self.cross, column, own)
        else:
            gathered = self.scratch.take("column", self.hosts * own.numel(), output)
            all_gather_whole(self.cross, gathered, own)
            column = list(gathered.view(self.hosts, -1))
        all_gather_coalesced(self.local, [block.view(-1) for block in grid], column)
        if not self.by_host:
            torch.index_select(target, 0, self._order(output.device)[0], out=rows)

    def reduce_scatter(self, output: Tensor, whole: Tensor, reduction: Any, direct: bool) -> None:
        """The n pieces of `whole`, each reduced over all ranks and left in `output` of the rank it is for."""
        rows = whole.view(self.size, -1)
        if not self.by_host:
            ordered = self.scratch.take("rows", whole.numel(), whole).view_as(rows)
            rows = torch.index_select(rows, 0, self._order(whole.device)[1], out=ordered)
        blocks = [block.view(-1) for block in rows.view(self.hosts, self.locals, -1)]
        partial = self.scratch.take("partial", self.hosts * output.numel(), whole)
        summed = _sum_for(reduction)
        reduce_scatter_coalesced(self.local, list(partial.view(self.hosts, -1)), blocks, summed)
        if direct:
            self._exchange_and_reduce(output.view(-1), partial, summed)
        else:
            reduce_scatter_whole(self.cross, output.view(-1), partial, summed)
        if reduction == dist.ReduceOp.AVG:
            output.div_(self.size)

    def all_reduce(self, tensor: Tensor, reduction: Any, direct: bool) -> None:
        """`tensor` (contiguous) reduced over all ranks, in place; every rank gets the same bits."""
        whole = tensor.view(-1)
        share = -(-whole.numel() // self.size) * self.hosts  # of a rank inside its host; between hosts cut once more
        padded = whole
        if share * self.locals != whole.numel():
            padded = self.scratch.take("padded", share * self.locals, tensor)
            padded[: whole.numel()].copy_(whole)
            padded[whole.numel() :].zero_()
        summed, own_share = _sum_for(reduction), self.scratch.take("share", share, tensor)
        reduce_scatter_whole(self.local, own_share, padded, summed)
        if direct:
            pieces = list(own_share.view(self.hosts, -1))
            reduced = self.scratch.take("piece", pieces[0].numel(), tensor)
            self._exchange_and_reduce(reduced, own_share, summed)
            pieces[self.host].copy_(reduced)
            exchange(self.cross, pieces, pieces[self.host])
        else:
            options = dist.AllreduceOptions()
            options.reduceOp = summed
            self.cross.allreduce([own_share], options).wait()
        if reduction == dist.ReduceOp.AVG:
            own_share.div_(self.size)
        all_gather_whole(self.local, padded, own_share)
        if padded is not whole:
            whole.copy_(padded[: whole.numel()])

    # --- parts of them

    def _exchange_and_reduce(self, output: Tensor, partial: Tensor, reduction: Any) -> None:
        """Send each host its piece of `partial`, and reduce what comes in the order of the hosts."""
        received = self.scratch.take("received", partial.numel(), partial)
        all_to_all(self.cross, received, partial)
        REDUCTIONS[reduction](received.view(self.hosts, -1), output)

    def _order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(host-major place of each group rank, group rank of each place)."""
        if device not in self._orders:
            places = torch.tensor(self.order, device=device)
            self._orders[device] = (places, torch.argsort(places))
        return self._orders[device]


def exchange(group: dist.ProcessGroup, slots: Sequence[Tensor], part: Tensor) -> None:
    """Everybody's `mine` to everybody's `slots`, each pair of ranks directly; `mine` is this rank's own slot."""
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    if group.name() != "gloo":  # NCCL and the engine start all of them as one call
        group.alltoall(list(slots), [part] * group.size()).wait()
        return
    # Gloo's list form copies into one buffer first; these write where the pieces belong.
    works = [group.recv([slots[peer]], peer, 0) for peer in peers]
    works += [group.send([part], peer, 0) for peer in peers]
    for work in works:
        work.wait()


def _sum_for(reduction: Any) -> Any:
    return dist.ReduceOp.SUM if reduction == dist.ReduceOp.AVG else reduction
