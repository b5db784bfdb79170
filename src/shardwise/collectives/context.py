"""The autograd collectives of context parallelism: parts of a sequence gathered, exchanged for heads, passed round.

A sequence of 2c chunks is dealt to c ranks in zig-zag order: rank r holds chunks r and 2c-1-r, so that under a causal
mask every rank has the same work (arXiv 2407.21783, section 3.3.2). Whole sequences come back in natural order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives.names import collective_name

# What travels.
KEYS_AND_VALUES = "attention's keys or values"
HEADS = "attention's heads"
RING = "attention's blocks"


class _Gather(torch.autograd.Function):
    """[...] of each rank -> [c, ...] on all; the gradient of each is the sum of what all ranks made of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = values.new_empty(group.size(), *values.shape)
        with collective_name(KEYS_AND_VALUES, group, "all_gather"):
            all_gather_single(parts.flatten(0, 1), values.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = gradients[0].contiguous()
        own = torch.empty_like(parts[0])
        with collective_name(KEYS_AND_VALUES, ctx.group, "reduce_scatter"):
            reduce_scatter_single(own, parts.flatten(0, 1), group=ctx.group)
        return own, None


class _Exchange(torch.autograd.Function):
    """[c, ...]: part i goes to rank i, and part i of the result came from rank i. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    values = values.contiguous()
    received = torch.empty_like(values)
    with collective_name(HEADS, group, "all_to_all"):
        dist.all_to_all_single(received, values, group=group)
    return received


def gather_sequence(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, h, S/c, d] of each rank -> [B, h, S, d] in natural order; backward reduce-scatters the gradient."""
    parts: Tensor = _Gather.apply(values, group)
    return join_chunks(parts.unbind(0), 2)


def heads_for_rows(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, h, S/c, d] -> [B, h/c, S, d]: a share of the heads for all of the sequence (arXiv 2309.14509, section 3)."""
    shares = torch.stack(values.chunk(group.size(), dim=1))
    parts: Tensor = _Exchange.apply(shares, group)
    return join_chunks(parts.unbind(0), 2)


def rows_for_heads(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S, h/c, d] -> [B, S/c, h, d], the way back, in the order of attention's output."""
    parts = torch.stack(deal_chunks(values, 1, group.size()))
    shares: Tensor = _Exchange.apply(parts, group)
    return torch.cat(shares.unbind(0), dim=2)


def join_chunks(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the whole sequence along `dim` of the ranks' parts."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)


def deal_chunks(whole: Tensor, dim: int, degree: int) -> list[Tensor]:
    """Return each rank's part of the whole sequence along `dim`."""
    chunks = whole.chunk(2 * degree, dim)
    return [torch.cat([chunks[rank], chunks[-1 - rank]], dim) for rank in range(degree)]


def pass_on(values: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Send `values` to the next rank of the ring and receive as much from the one before. Without autograd."""
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    after, before = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    sent = [value.contiguous() for value in values]
    received = [torch.empty_like(value) for value in sent]
    operations = [dist.P2POp(dist.isend, value, after, group) for value in sent]
    operations += [dist.P2POp(dist.irecv, value, before, group) for value in received]
    with collective_name(RING, group, "batch_isend_irecv"):
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return received
