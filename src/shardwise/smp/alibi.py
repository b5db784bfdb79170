"""ALiBi (Press et al., arXiv 2108.12409): scores fall with the distance of query and key, each head's by a slope."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST = 8  # the exponent of the last head's slope


def alibi_slopes(heads: int, largest: float = LARGEST) -> list[float]:
    """Head i of n: 2^(-largest * i / n), i from 1. Of a number that is no power of 2 the heads take slopes of the next
    power, every second one first."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-largest * (head + 1) / power) for head in range(power)]
    return slopes if power == heads else [*slopes[1::2], *slopes[::2]][:heads]


def alibi_bias(slopes: Sequence[float], length: int, like: Tensor) -> Tensor:
    """[heads, S, S] to be added to scores, of the dtype and device of `like`."""
    steps = torch.arange(length, device=like.device)
    falls = torch.tensor(slopes, dtype=like.dtype, device=like.device)
    return -falls[:, None, None] * (steps[:, None] - steps[None, :]).abs()


def with_alibi(query: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The additive mask of attention of [B, heads, S, D] with ALiBi, with `mask` and what causal attention hides."""
    heads, length = query.shape[1], query.shape[-2]
    bias = alibi_bias(alibi_slopes(heads), length, query)
    if causal:
        ahead = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        bias = bias.masked_fill(ahead, torch.finfo(query.dtype).min)
    return bias if mask is None else (bias + mask).clamp(min=torch.finfo(query.dtype).min)
