"""Log-probabilities of given continuations, by a sharded model on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.names import CollectiveName
from shardwise.job.devices import widest_float
from shardwise.parallel.model import ParallelModel

MOST_LOGITS = 1 << 27  # of one forward of a rank: half a gigabyte in fp32
MOST_ROWS = 64
SCORES = CollectiveName("scores of continuations", "world", "all_reduce")


class Continuation(NamedTuple):
    """Token ids whose log-probability is asked for, and those before them, of which there is at least one."""

    prompt: list[int]
    tokens: list[int]

    def cut(self, limit: int) -> Continuation:
        """Return it with the end of its prompt, so that the model reads at most `limit` tokens."""
        surplus = max(0, len(self.prompt) + len(self.tokens) - 1 - limit)
        return Continuation(self.prompt[surplus:], self.tokens)


def most_tokens(model: ParallelModel) -> int:
    """Return how many tokens the model reads at most: its positions, or the job's sequence length where it has none."""
    return model.facts.max_positions or model.plan.sequence_length


def log_likelihoods(model: ParallelModel, rows: Sequence[Continuation]) -> list[tuple[float, bool]]:
    """Return of each row its summed log-probability in nats, and True where each of its tokens is the likeliest.

    Ranks of different data share the rows. They are padded on the right, where no causal model looks. Collective;
    equal on every rank.
    """
    limit, shares = most_tokens(model), model.layout.data_ranks
    short = [row.cut(limit) for row in rows]
    longest_first = sorted(range(len(rows)), key=lambda number: -_length(short[number]))
    scores = torch.zeros(len(rows), 2, dtype=widest_float(model.device), device=model.device)
    with torch.no_grad(), model.whole_logits():
        while longest_first:
            count = shares * _rows_at_once(model, _length(short[longest_first[0]]))
            chosen, longest_first = longest_first[:count], longest_first[count:]
            own = chosen[model.layout.data_rank :: shares]
            filled = own + chosen[:1] * (-(-len(chosen) // shares) - len(own))  # shares have equally many
            values = _score(model, [short[number] for number in filled], _length(short[chosen[0]]))
            if model.is_reporting_rank and own:
                scores[own] = values[: len(own)].to(scores.dtype)
    model.reshard()
    with SCORES:
        dist.all_reduce(scores)
    return [(total, bool(is_greedy)) for total, is_greedy in scores.tolist()]


def _length(row: Continuation) -> int:
    """Return how many tokens the model reads: the last one is only predicted."""
    return max(1, len(row.prompt) + len(row.tokens) - 1)


def _rows_at_once(model: ParallelModel, length: int) -> int:
    return max(1, min(MOST_ROWS, MOST_LOGITS // (length * model.facts.vocabulary_size)))


def _score(model: ParallelModel, rows: Sequence[Continuation], length: int) -> Tensor:
    """Return [B, 2]: the log-probability of each row, and 1 where all of its tokens are the likeliest."""
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : _length(row)] = torch.tensor([*row.prompt, *row.tokens][: _length(row)])

    def read(logits: Tensor) -> Tensor:
        return torch.stack([_read_row(logits[number], row) for number, row in enumerate(rows)])

    return model.read_logits(ids.to(model.device), read, 2)


def _read_row(logits: Tensor, row: Continuation) -> Tensor:
    """Return [2] of logits [S, V]."""
    start = len(row.prompt) - 1
    wide = logits[start : start + len(row.tokens)].float()
    tokens = torch.tensor(row.tokens, device=logits.device)
    total = wide.log_softmax(-1).gather(-1, tokens[:, None]).sum()
    return torch.stack([total, (wide.argmax(-1) == tokens).all().to(total.dtype)])
