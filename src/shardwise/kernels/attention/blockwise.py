"""Attention in blocks of queries and keys on one rank: no mask, bias or score exists for more than one block.

On a CPU a block is torch's fused kernel where it can be; under dropout or a soft cap it is plain products. What is
hidden altogether is never computed. Dropout takes the factors that the eager kernel would multiply by, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._torch_compat.operators import has_flash_attention
from shardwise.kernels.attention.blocks import ALL, SavedRows, ScoreBlock, merge_block, repeat_key_heads, sum_key_heads
from shardwise.kernels.attention.call import AttentionCall, DropoutFactors
from shardwise.kernels.attention.masks import Mask, MaskBlock, block_slices
from shardwise.kernels.kept_results import kept
from shardwise.kernels.loss import loss_dtype


@dataclass(frozen=True)
class BlockwiseSettings:
    """Settings of attention in blocks, beside its tensors.

    Attributes:
        scale: of the scores.
        causal: keys ahead of the query are hidden; with a mask it says so itself.
        mask: which keys are seen.
        bias: [1 or B, 1 or h, 1 or Q, K], without a gradient.
        softcap: of the scores.
        dropout_factors: of the probabilities.
    """

    scale: float
    causal: bool = False
    mask: Mask | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    dropout_factors: DropoutFactors | None = None


def blockwise(call: AttentionCall) -> Tensor:
    """Return [B, h, Q, d] of a call."""
    dropout_factors = call.dropout_factors() if call.dropout > 0 else None
    settings = BlockwiseSettings(call.scale, call.causal, call.mask, call.bias, call.softcap, dropout_factors)
    return blockwise_attention(call.query, call.key, call.value, settings)


@torch.compiler.disable
def blockwise_attention(query: Tensor, key: Tensor, value: Tensor, settings: BlockwiseSettings) -> Tensor:
    """Return the [B, h, Q, d] attention output; a query that sees no key gets zeros.

    Args:
        query: [B, h, Q, e].
        key, value: [B, k, K, e] and [B, k, K, d], k a divisor of h (grouped-query attention).
        settings: the rest.
    """
    output: Tensor = _BlockwiseAttention.apply(query, key, value, settings)
    return output


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, settings: BlockwiseSettings) -> Tensor:
        blocks = list(_blocks(query, key, value, settings))
        result, normaliser = kept(lambda: _attended(query, key, value, blocks))
        ctx.save_for_backward(query, key, value, result, normaliser)
        ctx.blocks = blocks
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser = ctx.saved_tensors
        keys, values, gradient = repeat_key_heads(key, query), repeat_key_heads(value, query), gradients[0].contiguous()
        if len(ctx.blocks) == 1:
            block = ctx.blocks[0]
            parts = block.backward(
                query[block.rows], keys[block.columns], values[block.columns],
                SavedRows(gradient[block.rows], output[block.rows], normaliser[block.rows]),
            )  # fmt: skip
            whole = all(part.shape == like.shape for part, like in zip(parts, (query, keys, values), strict=True))
            if whole:
                gradients_of = zip(parts, (query, key, value), strict=True)
                return *(sum_key_heads(part, like).to(like.dtype) for part, like in gradients_of), None
        totals = [
            torch.zeros(tensor.shape, dtype=normaliser.dtype, device=tensor.device) for tensor in (query, keys, values)
        ]
        for block in ctx.blocks:
            saved = SavedRows(gradient[block.rows], output[block.rows], normaliser[block.rows])
            parts = block.backward(query[block.rows], keys[block.columns], values[block.columns], saved)
            for total, part, where in zip(totals, parts, (block.rows, block.columns, block.columns), strict=True):
                total[where] += part
        gradients_of = zip(totals, (query, key, value), strict=True)
        return *(sum_key_heads(part, like).to(like.dtype) for part, like in gradients_of), None


def _attended(query: Tensor, key: Tensor, value: Tensor, blocks: list[ScoreBlock]) -> tuple[Tensor, Tensor]:
    keys, values = repeat_key_heads(key, query), repeat_key_heads(value, query)
    if len(blocks) == 1 and blocks[0].mask is None and blocks[0].rows[2] == slice(0, query.shape[2]):
        return blocks[0].forward(query, keys, values)  # all in one: there is nothing to merge
    return _merged(query, keys, values, blocks)


def _merged(query: Tensor, keys: Tensor, values: Tensor, blocks: list[ScoreBlock]) -> tuple[Tensor, Tensor]:
    """(output in the dtype of the query, log-sum-exp; 0 for a query that sees no key)."""
    wide = loss_dtype(query.dtype)
    output = torch.zeros(*query.shape[:-1], values.shape[-1], dtype=wide, device=query.device)
    normaliser = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
    for block in blocks:
        part, logs = block.forward(query[block.rows], keys[block.columns], values[block.columns])
        merge_block(output[block.rows], normaliser[block.rows], part, logs)
    return output.to(query.dtype), normaliser.masked_fill_(normaliser == -torch.inf, 0.0)


def _blocks(query: Tensor, key: Tensor, value: Tensor, settings: BlockwiseSettings) -> Iterator[ScoreBlock]:
    plain = settings.softcap is None and settings.dropout_factors is None
    fused = plain and query.shape[-1] == value.shape[-1] and has_flash_attention(query)
    mask, dropout_factors, heads, dtype = (
        settings.mask,
        settings.dropout_factors,
        query.shape[1],
        loss_dtype(query.dtype),
    )
    if mask is not None and mask.causal:
        mask = None
    diagonal = settings.causal if settings.mask is None else settings.mask.causal
    pieces = _plain_blocks(query.shape[2], key.shape[2], diagonal, fused) if mask is None else mask.visible_blocks
    for rows, columns, whole in pieces:
        yield ScoreBlock(
            (ALL, ALL, rows),
            (ALL, ALL, columns),
            settings.scale,
            fused,
            diagonal and columns.stop > rows.start + 1,
            rows.start - columns.start,
            mask=None if mask is None or whole else partial(mask.block, rows, columns),
            bias=None if settings.bias is None else partial(_part, settings.bias, rows, columns),
            factors=None if dropout_factors is None else partial(dropout_factors.factors, heads, rows, columns, dtype),
            softcap=settings.softcap,
        )


def _part(bias: Tensor, rows: slice, columns: slice) -> Tensor:
    return bias[:, :, rows if bias.shape[2] > 1 else ALL, columns]


def _plain_blocks(queries: int, keys: int, causal: bool, fused: bool) -> Iterator[MaskBlock]:
    """All with all in one piece where it is fused, else in blocks, of which a causal triangle has half."""
    if fused:
        yield MaskBlock(slice(0, queries), slice(0, keys), not causal)
        return
    for rows in block_slices(queries):
        for columns in block_slices(min(rows.stop, keys) if causal else keys):
            yield MaskBlock(rows, columns, not causal)
