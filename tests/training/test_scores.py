"""Scores of continuations are those of plain transformers in one process, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shardwise.job.schema import Job
from shardwise.testing.capture import gather
from shardwise.testing.world import WorldPool
from shardwise.training.rank_calls import answer_calls, calls_on_all_ranks
from shardwise.training.sample import continue_greedily
from shardwise.training.scores import Continuation, log_likelihoods
from shardwise.training.setup import set_up
from tests.parity.jobs import tensor_job

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 2": (2, {}),
    "shard 2 x replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "sequence 2": (2, {"tensor_parallel_degree": 2, "sequence_parallel": True}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "context 2": (2, {"context_parallel_degree": 2}),
    "tensor 2 x pipeline 2": (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
}
ROWS = [
    Continuation([1], [2]),
    Continuation([3, 4, 5, 6], [7, 8, 9]),
    Continuation([9, 8], [7, 6, 5, 4, 3]),
    Continuation(list(range(40)), [5, 6]),  # longer than the model's positions
]
EMPTY = Continuation([2], [])


def scored(job: Job) -> tuple[list[tuple[float, bool]], dict[str, torch.Tensor]]:
    """Return the scores of the rows, asked for by rank 0 alone, and the weights."""
    run = set_up(job, torch.device("cpu"))
    weights = gather(run)
    if torch.distributed.get_rank() != 0:
        answer_calls(run.model)
        return [], weights
    with calls_on_all_ranks(run.model) as calls:
        first = calls.call(log_likelihoods, ROWS) + calls.call(log_likelihoods, [EMPTY])
        likeliest = calls.call(continue_greedily, [ROWS[1].prompt], 2)[0]
        return first + calls.call(log_likelihoods, [Continuation(ROWS[1].prompt, likeliest)]), weights


@torch.no_grad()
def plainly(job: Job, weights: dict[str, torch.Tensor], row: Continuation) -> tuple[float, bool]:
    config = dict(job.model.config)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config.pop("model_type")](**config)).double().eval()
    model.load_state_dict(weights)
    ids = torch.tensor([(row.prompt + row.tokens)[-model.config.max_position_embeddings - 1 :]])
    logits = model(ids[:, :-1]).logits[0, ids.shape[1] - 1 - len(row.tokens) :].log_softmax(-1)
    likeliest = bool((logits.argmax(-1) == torch.tensor(row.tokens)).all())
    return float(sum(line[token] for line, token in zip(logits, row.tokens))), likeliest


@pytest.mark.parametrize(
    "layout", [name if name == "tensor 2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_scores(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    job = tensor_job(corpora, "llama", tied=False, parallel=parallel)
    found, weights = world_pool.run(ranks, scored, job)[0]
    expected = [plainly(job, weights, row) for row in ROWS]
    for (total, is_greedy), (right, right_greedy) in zip(found, [*expected, (0.0, True)]):
        assert total == pytest.approx(right, rel=1e-6) and is_greedy == right_greedy
    assert len(found) == len(ROWS) + 2 and found[-1][1]
