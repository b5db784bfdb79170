"""Tensors handed from one rank to another in the middle of a forward, whose gradients come back the same way.

The rank that hands a tensor on does not wait until it is taken. What it hands on leaves nothing in its own forward, so
`tied` puts the way back into the graph: there, backward takes the gradient. Autograd runs what was made last first, so
that a rank does the backward of all that follows the tensor before it waits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.names import collective_name

STATE = "the state between parts of a sequence"


class Handoffs:
    """Hands tensors on between the ranks of `group`, and keeps what nobody may have taken yet."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def give(self, values: Tensor, rank: int) -> Tensor:
        """Hand `values` to a rank of the group; the result, without elements that matter, is for `tied`."""
        if torch.is_grad_enabled() and not values.requires_grad:
            # Of frozen modules. Whoever takes them does not know that, and sends a gradient, which has to be taken:
            # the next tensor from there would be mistaken for it.
            values = values.detach().requires_grad_()
        way_back: Tensor = _Give.apply(values, self, rank)
        return way_back

    def take(self, like: Tensor, rank: int) -> Tensor:
        """Return what a rank of the group hands on, of the shape and dtype of `like`, whose values do not matter."""
        if not torch.is_grad_enabled():
            return self.receive(like, rank)
        taken: Tensor = _Take.apply(torch.empty_like(like, requires_grad=True), self, rank)
        return taken

    def send(self, values: Tensor, rank: int) -> None:
        """Send to a rank of the group and do not wait."""
        values = values.contiguous()
        with collective_name(STATE, self.group, "isend"):
            work = dist.isend(values, self._ranks[rank], self.group)
        assert work is not None
        self._sent.append((work, values))

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Receive from a rank of the group."""
        values = torch.empty_like(like, requires_grad=False, memory_format=torch.contiguous_format)
        with collective_name(STATE, self.group, "irecv"):
            work = dist.irecv(values, self._ranks[rank], self.group)
        assert work is not None
        work.wait()
        return values

    def settle(self) -> None:
        """Wait until all that was sent is taken. Others must not wait for this rank to go on."""
        while self._sent:
            work, _ = self._sent.pop()
            work.wait()


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, handoffs: Handoffs, rank: int) -> Tensor:
        ctx.handoffs, ctx.rank, ctx.shape = handoffs, rank, values.shape
        ctx.save_for_backward(values.new_empty(0))
        handoffs.send(values.detach(), rank)
        return values.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (empty,) = ctx.saved_tensors  # of the device and dtype
        return ctx.handoffs.receive(empty.new_empty(ctx.shape), ctx.rank), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, handoffs: Handoffs, rank: int) -> Tensor:
        ctx.handoffs, ctx.rank = handoffs, rank
        return handoffs.receive(like, rank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.handoffs.send(gradients[0], ctx.rank)
        return None, None, None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, way_back: Tensor) -> Tensor:
        ctx.dtype = way_back.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, gradient.new_zeros((), dtype=ctx.dtype)


def tied(values: Tensor, way_back: Tensor) -> Tensor:
    """Return `values`, whose backward takes the gradient of what was given on the way to them."""
    result: Tensor = _Tied.apply(values, way_back)
    return result
