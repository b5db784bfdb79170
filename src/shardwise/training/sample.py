"""Text from a sharded model: all ranks run the forward in lockstep, rank 0 draws or chooses the next token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.model import ParallelModel

TEMPERATURE = 0.8
TOGETHER = 64  # prompts of one length in a forward


def generate(model: ParallelModel, prompt: list[int], tokens: int, seed: int) -> list[int]:
    """`prompt` continued by `tokens` token ids, drawn at temperature 0.8. Collective; equal on every rank.

    No cache: the forward runs over the whole text for each token, which keeps the ranks' collectives in step on every
    layout. The context is cut to the model's positions.
    """
    ids = torch.tensor([prompt], dtype=torch.int64, device=model.device)
    limit = model.facts.max_positions or len(prompt) + tokens
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad(), model.whole_logits():
        for _ in range(tokens):
            logits = model.last_logits(ids[:, -limit:])
            drawn = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
            dist.broadcast(drawn, src=0)  # ranks could round differently; one of them decides
            ids = torch.cat([ids, drawn], dim=1)
    model.reshard()
    result: list[int] = ids[0].tolist()
    return result


def continue_greedily(
    model: ParallelModel, prompts: Sequence[Sequence[int]], tokens: int, end: int | None = None
) -> list[list[int]]:
    """Return the `tokens` likeliest token ids behind each prompt, or fewer before `end`. Collective; equal everywhere.

    Prompts of one length go through the model together, so that none needs padding.
    """
    numbers_of: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        numbers_of.setdefault(len(prompt), []).append(number)
    continued: dict[int, list[int]] = {}
    with torch.no_grad(), model.whole_logits():
        for length, numbers in numbers_of.items():
            for start in range(0, len(numbers), TOGETHER):
                chosen = numbers[start : start + TOGETHER]
                rows = _likeliest(model, [prompts[number] for number in chosen], tokens, end)[:, length:].tolist()
                continued |= dict(zip(chosen, rows, strict=True))
    model.reshard()
    return [_before(continued[number], end) for number in range(len(prompts))]


def _likeliest(model: ParallelModel, prompts: Sequence[Sequence[int]], tokens: int, end: int | None) -> Tensor:
    """Return prompts [B, S] with the likeliest tokens behind them, until each row has ended or has `tokens` more."""
    ids = torch.tensor(prompts, dtype=torch.int64, device=model.device)
    limit = model.facts.max_positions or ids.shape[1] + tokens
    has_ended = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for _ in range(tokens):
        best = model.last_logits(ids[:, -limit:]).argmax(-1, keepdim=True)
        dist.broadcast(best, src=0)  # of two equal logits ranks could choose another
        ids = torch.cat([ids, best], dim=1)
        has_ended |= best[:, 0] == (-1 if end is None else end)
        if bool(has_ended.all()):
            break
    return ids


def _before(tokens: list[int], end: int | None) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
