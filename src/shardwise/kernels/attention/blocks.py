"""One product of some queries with some keys: its result and log-sum-exp, and its gradients from the merged ones.

Two blocks of the same queries merge exactly by the log-sum-exp of their scores, and backward takes every block's
gradients from the merged output and log-sum-exp, as in FlashAttention-2 (arXiv 2307.08691, section 3.1), so that no
[S, S] matrix is kept. A ring of ranks and attention in blocks on one rank are both made of these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise._torch_compat.operators import flash_attention, flash_attention_backward
from shardwise.kernels.loss import loss_dtype

ALL = slice(None)


@contextmanager
def _flushing_denormals(where: torch.device) -> Iterator[None]:
    """Let a CPU take numbers below the smallest normal one (1.2e-38 in fp32) for 0.

    A bias such as ALiBi's leaves many probabilities there, which made a layer's attention 4.6 times as slow.
    """
    if where.type != "cpu":
        yield
        return
    flushed = sys.float_info.min * 0.5 == 0.0  # no tensor's number: fake ones have none
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


class SavedRows(NamedTuple):
    """Rows of a block that backward reads: the output's gradient, the merged output, its log-sum-exp."""

    gradient: Tensor
    output: Tensor
    normaliser: Tensor


@dataclass(frozen=True)
class ScoreBlock:
    """One product of queries and keys: `rows` and `columns` index [B, h, S, ...] tensors.

    Attributes:
        scale: of the scores.
        fused: torch's kernel runs it; it knows no soft cap and no dropout.
        diagonal: keys ahead of the query are hidden, where the first query is `offset` behind the first key.
        mask: [1 or B, 1, Q, K] bool (True: seen) or additive.
        bias: [1 or B, 1 or h, 1 or Q, K] added to the scores.
        factors: [B, h, Q, K] dropout factors, 0 or 1 / (1 - probability).
        softcap: scores s become cap * tanh(s / cap).
    """

    rows: tuple[slice, ...]
    columns: tuple[slice, ...]
    scale: float
    fused: bool = False
    diagonal: bool = False
    offset: int = 0
    mask: Callable[[], Tensor] | None = None
    bias: Callable[[], Tensor] | None = None
    factors: Callable[[], Tensor] | None = None
    softcap: float | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return (output [B, h, Q, d], log-sum-exp [B, h, Q])."""
        with _flushing_denormals(query.device) if self.bias is not None else nullcontext():
            return self._forward(query, key, value)

    def backward(self, query: Tensor, key: Tensor, value: Tensor, saved: SavedRows) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        with _flushing_denormals(query.device) if self.bias is not None else nullcontext():
            return self._backward(query, key, value, saved)

    def _forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused:
            mask, hidden = self._fused_mask(query)
            part, logs = flash_attention(query, key, value, self.diagonal, self.scale, mask)
            return part, logs if hidden is None else logs.masked_fill(hidden, -torch.inf)
        scores, _ = self._scores(query, key)
        logs = scores.logsumexp(-1)
        weights = _weights(scores, logs)
        kept = weights if self.factors is None else weights * self.factors()
        return kept.to(value.dtype) @ value, logs

    def _backward(self, query: Tensor, key: Tensor, value: Tensor, saved: SavedRows) -> tuple[Tensor, Tensor, Tensor]:
        if self.fused:
            mask, _ = self._fused_mask(query)
            return flash_attention_backward(query, key, value, self.diagonal, self.scale, *saved, mask)
        scores, slope = self._scores(query, key)
        weights = _weights(scores, saved.normaliser)
        for_weights = _product(saved.gradient, value)
        kept = weights
        if self.factors is not None:
            factors = self.factors()
            kept, for_weights = weights * factors, for_weights * factors
        inner = (saved.gradient.to(weights.dtype) * saved.output).sum(-1, keepdim=True)
        for_scores = weights * (for_weights - inner) * self.scale
        if slope is not None:
            for_scores *= slope
        for_scores = for_scores.to(query.dtype)
        return for_scores @ key, for_scores.mT @ query, kept.to(value.dtype).mT @ saved.gradient

    def _fused_mask(self, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(what is added to the scores, in the dtype of the query; [1 or B, 1, Q] rows that see nothing)."""
        bias = None if self.bias is None else self.bias().to(query.dtype)
        if self.mask is None:
            return (None if bias is None else bias.expand(-1, -1, query.shape[2], -1)), None
        mask = self.mask()
        if mask.dtype != torch.bool:
            return (mask if bias is None else mask + bias).to(query.dtype), None
        bias = torch.zeros((), dtype=query.dtype, device=query.device) if bias is None else bias
        return torch.where(mask, bias, -torch.inf), ~mask.any(-1)

    def _scores(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, h, Q, K] scores, hidden ones -inf; and with a soft cap its derivative."""
        scores, slope = _product(query, key) * self.scale, None
        if self.softcap is not None:
            bent = (scores / self.softcap).tanh_()
            scores, slope = bent * self.softcap, 1 - bent.square()
        if self.bias is not None:
            scores = scores + self.bias()
        if self.diagonal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1 + self.offset)
            scores = scores.masked_fill_(ahead, -torch.inf)
        if self.mask is not None:
            mask = self.mask()
            scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return scores, slope


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    """[B, h, Q, K] products of [B, h, Q, d] and [B, h, K, d] in fp32 or wider; those of fp16 leave its range."""
    wide = loss_dtype(rows.dtype)
    if rows.dtype == torch.float16:
        rows, columns = rows.to(wide), columns.to(wide)
    return (rows @ columns.mT).to(wide)


def _weights(scores: Tensor, normaliser: Tensor) -> Tensor:
    """Return the softmax of scores by the rows' log-sum-exp; a row that sees no key here has weights of zero."""
    lowest = torch.finfo(scores.dtype).min
    return (scores - normaliser.clamp(min=lowest).unsqueeze(-1)).exp_()


def repeat_key_heads(keys: Tensor, query: Tensor) -> Tensor:
    """Repeat key heads for their groups of query heads: [B, k, S, d] -> [B, h, S, d]."""
    groups = query.shape[1] // keys.shape[1]
    return keys if groups == 1 else keys.repeat_interleave(groups, dim=1)


def sum_key_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum gradients of query heads by their key head: the transpose of `repeat_key_heads`."""
    heads = like.shape[1]
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2, dtype=like.dtype)


def merge_block(output: Tensor, normaliser: Tensor, part: Tensor, logs: Tensor) -> None:
    """Add a block's output [B, h, Q, d] and log-sum-exp [B, h, Q] to the running ones, in place."""
    both = torch.logaddexp(normaliser, logs)
    least = both.clamp(min=torch.finfo(both.dtype).min)  # rows that have seen no key yet are -inf
    output.mul_((normaliser - least).exp_().unsqueeze(-1)).add_(part * (logs - least).exp_().unsqueeze(-1))
    normaliser.copy_(both)
