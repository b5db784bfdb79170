"""Attention around a ring of ranks: each keeps its queries, keys and values go round (arXiv 2310.01889).

Blocks merge by their log-sum-exp (kernels/attention/blocks.py), in forward as in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.operators import has_flash_attention
from shardwise.collectives.context import pass_on
from shardwise.kernels.attention.blocks import ALL, SavedRows, ScoreBlock, merge_block, repeat_key_heads, sum_key_heads
from shardwise.kernels.kept_results import kept
from shardwise.kernels.loss import loss_dtype

# (rank whose keys they are, its rows of queries, columns of keys) -> something of that block.
BlockFunction = Callable[[int, slice, slice], Tensor]
SCORE_ROWS = 512  # queries of a block that is not fused: its scores are [B, h, SCORE_ROWS, keys]


@dataclass(frozen=True)
class RingSettings:
    """Settings of a ring's attention, beside its tensors.

    Attributes:
        group: the ranks among which keys and values go round.
        scale: of the scores.
        causal: whether later keys are hidden; only without a mask, which says it itself.
        mask: [1 or B, 1, Q, K] of a block, bool (True: attend) or additive; None hides nothing.
        dropout_factors: [B, h, Q, K] of a block, 0 or 1 / (1 - probability); None drops nothing.
        bias: [1 or B, 1 or h, 1 or Q, K] of a block, added to its scores, without a gradient.
    """

    group: dist.ProcessGroup
    scale: float
    causal: bool
    mask: BlockFunction | None = None
    dropout_factors: BlockFunction | None = None
    bias: BlockFunction | None = None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: RingSettings) -> Tensor:
    """Return the [B, h, S/c, d] attention output of this rank's queries over the keys of all ranks of the ring.

    Args:
        query: [B, h, S/c, d].
        key, value: [B, k, S/c, d], k a divisor of h (grouped-query attention).
        ring: the rest.
    """
    output: Tensor = _RingAttention.apply(query, key, value, ring)
    return output


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: RingSettings) -> Tensor:
        result, normaliser = kept(lambda: _merged(query, key, value, ring))
        ctx.save_for_backward(query, key, value, result, normaliser)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser = ctx.saved_tensors
        ring: RingSettings = ctx.ring
        wide, rank, degree = normaliser.dtype, ring.group.rank(), ring.group.size()
        moving, gradient = [key, value], gradients[0].contiguous()
        for_query = torch.zeros(query.shape, dtype=wide, device=query.device)
        carried = [torch.zeros(tensor.shape, dtype=wide, device=tensor.device) for tensor in moving]
        for step in range(degree):
            keys, values = (repeat_key_heads(tensor, query) for tensor in moving)
            for block in _blocks(query, value, ring, (rank - step) % degree):
                saved = SavedRows(gradient[block.rows], output[block.rows], normaliser[block.rows])
                parts = block.backward(query[block.rows], keys[block.columns], values[block.columns], saved)
                for_query[block.rows] += parts[0]
                for total, part in zip(carried, parts[1:], strict=True):
                    total[block.columns] += sum_key_heads(part, total)
            carried = pass_on(carried, ring.group)  # after the last step the gradients are at home
            if step < degree - 1:
                moving = pass_on(moving, ring.group)
        gradients_of = zip((for_query, *carried), (query, key, value), strict=True)
        return *(part.to(like.dtype) for part, like in gradients_of), None


def _merged(query: Tensor, key: Tensor, value: Tensor, ring: RingSettings) -> tuple[Tensor, Tensor]:
    """(output in the dtype of the query, log-sum-exp)."""
    wide = loss_dtype(query.dtype)
    output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=wide, device=query.device)
    normaliser = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
    rank, degree = ring.group.rank(), ring.group.size()
    moving = [key, value]
    for step in range(degree):
        keys, values = (repeat_key_heads(tensor, query) for tensor in moving)
        for block in _blocks(query, value, ring, (rank - step) % degree):
            part, logs = block.forward(query[block.rows], keys[block.columns], values[block.columns])
            merge_block(output[block.rows], normaliser[block.rows], part, logs)
        if step < degree - 1:
            moving = pass_on(moving, ring.group)
    return output.to(query.dtype), normaliser


def _blocks(query: Tensor, value: Tensor, ring: RingSettings, source: int) -> Iterator[ScoreBlock]:
    """The products of this rank's queries with the keys of rank `source`, in pieces of few rows where not fused."""
    plain = ring.mask is None and ring.dropout_factors is None
    fused = plain and query.shape[-1] == value.shape[-1] and has_flash_attention(query)
    for rows, columns, diagonal in _products(query.shape[2], ring, source):
        size = rows.stop - rows.start if fused else SCORE_ROWS
        for start in range(rows.start, rows.stop, size):
            piece = slice(start, min(start + size, rows.stop))
            yield ScoreBlock(
                (ALL, ALL, piece),
                (ALL, ALL, columns),
                ring.scale,
                fused,
                diagonal,
                start - rows.start,
                mask=ring.mask and partial(ring.mask, source, piece, columns),
                bias=ring.bias and partial(ring.bias, source, piece, columns),
                factors=ring.dropout_factors and partial(ring.dropout_factors, source, piece, columns),
            )


def _products(length: int, ring: RingSettings, source: int) -> Iterator[tuple[slice, slice, bool]]:
    """(rows, columns, on the diagonal): all with all, or under a plain causal mask the chunks that are not ahead.

    Every rank then has two whole products of chunks at each step, or one and two triangles.
    """
    if not ring.causal:
        yield slice(0, length), slice(0, length), False
        return
    rank, last, half = ring.group.rank(), 2 * ring.group.size() - 1, length // 2
    halves = (slice(0, half), slice(half, length))
    for rows, chunk in zip(halves, (rank, last - rank), strict=True):
        for columns, other in zip(halves, (source, last - source), strict=True):
            if other <= chunk:
                yield rows, columns, other == chunk
