"""Attention of parts of a sequence: blocks whose results are merged by their log-sum-exp, around a ring of ranks.

Each rank keeps its queries; keys and values go round (ring attention, arXiv 2310.01889). A block gives its output and
the log-sum-exp of its scores, and two blocks merge exactly; backward takes every block's gradients from the merged
output and log-sum-exp, as in FlashAttention-2 (arXiv 2307.08691, section 3.1), so that no [S, S] matrix is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat import flash_attention, flash_attention_backward, has_flash_attention
from shardwise.collectives.context import pass_on
from shardwise.kernels.loss import loss_dtype

Dropped = Callable[[int], Tensor]  # rank whose keys they are -> [B, h, S/c, S/c] factors, 0 or 1 / (1 - probability)
EVERY = slice(None)


def document_mask(document_ids: Tensor, causal: bool, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """[B, 1, S, S] additive mask: 0 where query and key share a document (the key not ahead), else the minimum.

    Args:
        document_ids: [B, S].
        causal: whether later keys are hidden.
        dtype: of the mask.
        rows: [Q] the queries' positions, for a mask [B, 1, Q, S] of some rows; unset: all.
    """
    columns = torch.arange(document_ids.shape[1], device=document_ids.device)
    rows = columns if rows is None else rows
    allowed = document_ids[:, rows].unsqueeze(2) == document_ids.unsqueeze(1)
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
        columns: rank -> positions of its keys in the mask's columns.
        dropped: dropout factors of the block of a rank's keys; None drops nothing.
    """

    group: dist.ProcessGroup
    scale: float
    causal: bool
    columns: Callable[[int], Tensor]
    dropped: Dropped | None = None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
    """[B, h, S/c, d] attention output of this rank's queries over the keys of all ranks of the ring.

    Args:
        query: [B, h, S/c, d].
        key, value: [B, k, S/c, d], k a divisor of h (grouped-query attention).
        mask: [1 or B, 1, S/c, S] bool (True: attend) or additive, or None.
        ring: the rest.
    """
    output: Tensor = _RingAttention.apply(query, key, value, mask, ring)
    return output


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
        wide = loss_dtype(query.dtype)
        output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=wide, device=query.device)
        normaliser = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
        here, degree = ring.group.rank(), ring.group.size()
        moving = [key, value]
        for step in range(degree):
            keys, values = (_widened(each, query) for each in moving)
            for block in _blocks(query, mask, ring, (here - step) % degree):
                part, logs = block.forward(query[block.rows], keys[block.columns], values[block.columns])
                _merge(output[block.rows], normaliser[block.rows[:-1]], part, logs)
            if step < degree - 1:
                moving = pass_on(moving, ring.group)
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, result, normaliser)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, normaliser = ctx.saved_tensors
        ring: Ring = ctx.ring
        wide, here, degree = normaliser.dtype, ring.group.rank(), ring.group.size()
        moving, gradient = [key, value], gradients[0].contiguous()
        for_query = torch.zeros(query.shape, dtype=wide, device=query.device)
        carried = [torch.zeros(each.shape, dtype=wide, device=each.device) for each in moving]
        for step in range(degree):
            keys, values = (_widened(each, query) for each in moving)
            for block in _blocks(query, mask, ring, (here - step) % degree):
                saved = Saved(gradient[block.rows], output[block.rows], normaliser[block.rows[:-1]])
                parts = block.backward(query[block.rows], keys[block.columns], values[block.columns], saved)
                for_query[block.rows] += parts[0]
                for total, part in zip(carried, parts[1:], strict=True):
                    total[block.columns] += _narrowed(part, total)
            carried = pass_on(carried, ring.group)  # after the last step the gradients are at home
            if step < degree - 1:
                moving = pass_on(moving, ring.group)
        low = (for_query, *carried)
        return *(part.to(like.dtype) for part, like in zip(low, (query, key, value), strict=True)), None, None


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
    """One product of queries and keys: `rows` and `columns` index [B, h, S/c, d] tensors of this rank and of the other.

    `plain`: no mask and no dropout, so that a fused kernel may run it, `causal` with the diagonal.
    """

    rows: tuple[slice, ...]
    columns: tuple[slice, ...]
    scale: float
    causal: bool = False
    mask: Tensor | None = None
    factors: Callable[[], Tensor] | None = None

    def _fused(self, query: Tensor) -> bool:
        return self.mask is None and self.factors is None and has_flash_attention(query)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(output [B, h, Q, d], log-sum-exp [B, h, Q])."""
        if self._fused(query):
            return flash_attention(query, key, value, self.causal, self.scale)
        scores = self._scores(query, key)
        logs = scores.logsumexp(-1)
        weights = self._weights(scores, logs)
        kept = weights if self.factors is None else weights * self.factors()
        return kept.to(value.dtype) @ value, logs

    def backward(self, query: Tensor, key: Tensor, value: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        if self._fused(query):
            return flash_attention_backward(query, key, value, self.causal, self.scale, *saved)
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
        if self.causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
            return scores.masked_fill_(ahead, -torch.inf)
        if self.mask is None:
            return scores
        return scores.masked_fill_(~self.mask, -torch.inf) if self.mask.dtype == torch.bool else scores + self.mask

    def _weights(self, scores: Tensor, normaliser: Tensor) -> Tensor:
        """Of a row that sees no key here the scores are -inf and the weights zero."""
        lowest = torch.finfo(scores.dtype).min
        return (scores - normaliser.clamp(min=lowest).unsqueeze(-1)).exp_()


def _blocks(query: Tensor, mask: Tensor | None, ring: Ring, source: int) -> Iterator[_Block]:
    """The products of this rank's queries with the keys of rank `source`.

    Under a plain causal mask these are the chunks that are not ahead, those on the diagonal masked inside; every rank
    then has two whole products of chunks and a triangle or two at each step.
    """
    if mask is not None or not ring.causal:
        part = None if mask is None else mask[..., ring.columns(source)]
        factors = None if ring.dropped is None else _once(ring.dropped, source)
        yield _Block((EVERY,) * 4, (EVERY,) * 4, ring.scale, mask=part, factors=factors)
        return
    here, last, length = ring.group.rank(), 2 * ring.group.size() - 1, query.shape[2] // 2
    for half, chunk in enumerate((here, last - here)):
        for other_half, other in enumerate((source, last - source)):
            if other > chunk:
                continue
            rows, columns = _half(half, length), _half(other_half, length)
            factors = None if ring.dropped is None else _once(ring.dropped, source, rows[2], columns[2])
            yield _Block((*rows, EVERY), (*columns, EVERY), ring.scale, other == chunk, factors=factors)


def _half(number: int, length: int) -> tuple[slice, slice, slice]:
    return EVERY, EVERY, slice(number * length, (number + 1) * length)


def _once(dropped: Dropped, source: int, rows: slice = EVERY, columns: slice = EVERY) -> Callable[[], Tensor]:
    return lambda: dropped(source)[:, :, rows, columns]
