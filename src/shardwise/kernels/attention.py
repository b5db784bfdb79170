"""Attention of parts of a sequence: blocks whose results are merged by their log-sum-exp, around a ring of ranks.

Each rank keeps its queries; keys and values go round (ring attention, arXiv 2310.01889). A block gives its output and
the log-sum-exp of its scores, and two blocks merge exactly; backward takes every block's gradients from the merged
output and log-sum-exp, as in FlashAttention-2 (arXiv 2307.08691, section 3.1), so that no [S, S] matrix is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat import flash_attention, flash_attention_backward, has_flash_attention
from shardwise.collectives.context import pass_on
from shardwise.kernels.loss import loss_dtype

# (rank whose keys they are, its rows of queries, columns of keys) -> something of that block.
OfBlock = Callable[[int, slice, slice], Tensor]
SCORE_ROWS = 512  # queries of a block that is not fused: its scores are [B, h, SCORE_ROWS, keys]
EVERY = slice(None)


def document_mask(
    document_ids: Tensor,
    causal: bool,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """[B, 1, S, S] additive mask: 0 where query and key share a document (the key not ahead), else the minimum.

    Args:
        document_ids: [B, S].
        causal: whether later keys are hidden.
        dtype: of the mask.
        rows, columns: [Q] and [K] positions of the queries and keys of a part [B, 1, Q, K]; unset: all.
    """
    everything = torch.arange(document_ids.shape[1], device=document_ids.device)
    rows = everything if rows is None else rows
    columns = everything if columns is None else columns
    allowed = document_ids[:, rows].unsqueeze(2) == document_ids[:, columns].unsqueeze(1)
    if causal:
        allowed = allowed & (columns <= rows.unsqueeze(1))
    return additive(allowed, dtype).unsqueeze(1)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `allowed`, else the minimum of `dtype`, as transformers' eager attention wants it."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Ring:
    """What a ring's attention needs beside its tensors.

    Attributes:
        group: the ranks among which keys and values go round.
        scale: of the scores.
        causal: whether later keys are hidden; only without a mask, which says it itself.
        mask: [1 or B, 1, Q, K] of a block, bool (True: attend) or additive; None hides nothing.
        dropped: [B, h, Q, K] dropout factors of a block, 0 or 1 / (1 - probability); None drops nothing.
    """

    group: dist.ProcessGroup
    scale: float
    causal: bool
    mask: OfBlock | None = None
    dropped: OfBlock | None = None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """[B, h, S/c, d] attention output of this rank's queries over the keys of all ranks of the ring.

    Args:
        query: [B, h, S/c, d].
        key, value: [B, k, S/c, d], k a divisor of h (grouped-query attention).
        ring: the rest.
    """
    output: Tensor = _RingAttention.apply(query, key, value, ring)
    return output


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        wide = loss_dtype(query.dtype)
        output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=wide, device=query.device)
        normaliser = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
        here, degree = ring.group.rank(), ring.group.size()
        moving = [key, value]
        for step in range(degree):
            keys, values = (_widened(each, query) for each in moving)
            for block in _blocks(query, value, ring, (here - step) % degree):
                part, logs = block.forward(query[block.rows], keys[block.columns], values[block.columns])
                _merge(output[block.rows], normaliser[block.rows], part, logs)
            if step < degree - 1:
                moving = pass_on(moving, ring.group)
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, normaliser)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser = ctx.saved_tensors
        ring: Ring = ctx.ring
        wide, here, degree = normaliser.dtype, ring.group.rank(), ring.group.size()
        moving, gradient = [key, value], gradients[0].contiguous()
        for_query = torch.zeros(query.shape, dtype=wide, device=query.device)
        carried = [torch.zeros(each.shape, dtype=wide, device=each.device) for each in moving]
        for step in range(degree):
            keys, values = (_widened(each, query) for each in moving)
            for block in _blocks(query, value, ring, (here - step) % degree):
                saved = Saved(gradient[block.rows], output[block.rows], normaliser[block.rows])
                parts = block.backward(query[block.rows], keys[block.columns], values[block.columns], saved)
                for_query[block.rows] += parts[0]
                for total, part in zip(carried, parts[1:], strict=True):
                    total[block.columns] += _narrowed(part, total)
            carried = pass_on(carried, ring.group)  # after the last step the gradients are at home
            if step < degree - 1:
                moving = pass_on(moving, ring.group)
        found = zip((for_query, *carried), (query, key, value), strict=True)
        return *(part.to(like.dtype) for part, like in found), None


def _widened(keys: Tensor, query: Tensor) -> Tensor:
    """[B, k, S, d] -> [B, h, S, d]: each key head for its group of query heads."""
    groups = query.shape[1] // keys.shape[1]
    return keys if groups == 1 else keys.repeat_interleave(groups, dim=1)


def _narrowed(gradient: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_widened`."""
    heads = like.shape[1]
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2, dtype=like.dtype)


def _merge(output: Tensor, normaliser: Tensor, part: Tensor, logs: Tensor) -> None:
    """Add a block's output [B, h, Q, d] and log-sum-exp [B, h, Q] to the running ones, in place."""
    both = torch.logaddexp(normaliser, logs)
    least = both.clamp(min=torch.finfo(both.dtype).min)  # rows that have seen no key yet are -inf
    output.mul_((normaliser - least).exp_().unsqueeze(-1)).add_(part * (logs - least).exp_().unsqueeze(-1))
    normaliser.copy_(both)


class Saved(NamedTuple):
    """Of the rows of a block: the output's gradient, the merged output, its log-sum-exp."""

    gradient: Tensor
    output: Tensor
    normaliser: Tensor


@dataclass(frozen=True)
class _Block:
    """One product of queries and keys: `rows` and `columns` index [B, h, S/c, ...] tensors of this rank and of another.

    fused: torch's kernel runs it; it knows no mask and no dropout. diagonal: keys ahead of the query are hidden, where
    the first query is `offset` behind the first key.
    """

    rows: tuple[slice, ...]
    columns: tuple[slice, ...]
    scale: float
    fused: bool
    diagonal: bool
    offset: int
    mask: Callable[[], Tensor] | None
    factors: Callable[[], Tensor] | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(output [B, h, Q, d], log-sum-exp [B, h, Q])."""
        if self.fused:
            return flash_attention(query, key, value, self.diagonal, self.scale)
        scores = self._scores(query, key)
        logs = scores.logsumexp(-1)
        weights = self._weights(scores, logs)
        kept = weights if self.factors is None else weights * self.factors()
        return kept.to(value.dtype) @ value, logs

    def backward(self, query: Tensor, key: Tensor, value: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        if self.fused:
            return flash_attention_backward(query, key, value, self.diagonal, self.scale, *saved)
        weights = self._weights(self._scores(query, key), saved.normaliser)
        for_weights = (saved.gradient @ value.mT).to(weights.dtype)
        kept = weights
        if self.factors is not None:
            factors = self.factors()
            kept, for_weights = weights * factors, for_weights * factors
        inner = (saved.gradient.to(weights.dtype) * saved.output).sum(-1, keepdim=True)
        for_scores = (weights * (for_weights - inner) * self.scale).to(query.dtype)
        return for_scores @ key, for_scores.mT @ query, kept.to(value.dtype).mT @ saved.gradient

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores = (query @ key.mT).to(loss_dtype(query.dtype)) * self.scale
        if self.diagonal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1 + self.offset)
            return scores.masked_fill_(ahead, -torch.inf)
        if self.mask is None:
            return scores
        mask = self.mask()
        return scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask

    def _weights(self, scores: Tensor, normaliser: Tensor) -> Tensor:
        """Of a row that sees no key here the scores are -inf and the weights zero."""
        lowest = torch.finfo(scores.dtype).min
        return (scores - normaliser.clamp(min=lowest).unsqueeze(-1)).exp_()


def _blocks(query: Tensor, value: Tensor, ring: Ring, source: int) -> Iterator[_Block]:
    """The products of this rank's queries with the keys of rank `source`, in pieces of few rows where not fused."""
    plain = ring.mask is None and ring.dropped is None
    fused = plain and query.shape[-1] == value.shape[-1] and has_flash_attention(query)
    for rows, columns, diagonal in _products(query.shape[2], ring, source):
        size = rows.stop - rows.start if fused else SCORE_ROWS
        for start in range(rows.start, rows.stop, size):
            piece = slice(start, min(start + size, rows.stop))
            yield _Block(
                (EVERY, EVERY, piece),
                (EVERY, EVERY, columns),
                ring.scale,
                fused,
                diagonal,
                start - rows.start,
                ring.mask and partial(ring.mask, source, piece, columns),
                ring.dropped and partial(ring.dropped, source, piece, columns),
            )


def _products(length: int, ring: Ring, source: int) -> Iterator[tuple[slice, slice, bool]]:
    """(rows, columns, on the diagonal): all with all, or under a plain causal mask the chunks that are not ahead.

    Every rank then has two whole products of chunks at each step, or one and two triangles.
    """
    if not ring.causal:
        yield slice(0, length), slice(0, length), False
        return
    here, last, half = ring.group.rank(), 2 * ring.group.size() - 1, length // 2
    halves = (slice(0, half), slice(half, length))
    for rows, chunk in zip(halves, (here, last - here), strict=True):
        for columns, other in zip(halves, (source, last - source), strict=True):
            if other <= chunk:
                yield rows, columns, other == chunk
