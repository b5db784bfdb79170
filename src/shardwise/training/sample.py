"""A text sample from a sharded model: all ranks run the forward in lockstep, rank 0 draws the next token."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.parallel.model import ParallelModel

TEMPERATURE = 0.8


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
