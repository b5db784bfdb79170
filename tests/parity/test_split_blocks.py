"""Context ranks of models that see sequences whole, and whose blocks take rows of them, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import coverage
from shardwise.job.schema import Job
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.sample import generate
from shardwise.training.setup import set_up
from shardwise.training.step import evaluate
from tests.parity.jobs import check_agrees, facts_of, span_job

CONTEXT = {"context_parallel_degree": 2}
FULL = {"memory": {"activation_checkpointing": "full"}}
UNEVEN = {"data": {"sequence_length": 13}}
FROZEN = {"model": {"freeze": [".*embeddings", ".*layers.0"]}}  # the first mixer's state has no gradient
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8,
    "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip
ANGLES_BY_LENGTH = [  # which depend on the longest position of a call
    ("llama", {"rope_parameters": DYNAMIC}),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 8}),
]
SLOW: list[tuple[str, str, int, dict[str, Any]]] = [  # task, type, ranks, settings
    ("seq2seq_lm", "bart", 2, {"data": {"sequence_length": 19}, "training": {"microbatch_size": 2}}),
    ("seq2seq_lm", "longt5", 2, {}),  # attention in chunks of its own
    ("causal_lm", "qwen3_next", 2, {**UNEVEN, **FULL}),  # a recurrent mixer and attention, by turns
    ("causal_lm", "qwen3_next", 2, {**UNEVEN, **FULL, "model": {"freeze": [".*embed_tokens", ".*layers.0"]}}),
    ("causal_lm", "falcon_h1", 4, {"parallel": {"context_parallel_degree": 4}, "data": {"sequence_length": 27}}),
    ("causal_lm", "kimi_linear", 3, {"parallel": {"context_parallel_degree": 3}, **UNEVEN, **FULL}),
    ("causal_lm", "nemotron_h", 4, {"parallel": {**CONTEXT, "tensor_parallel_degree": 2}, **UNEVEN}),
    ("causal_lm", "lfm2_moe", 4, {"parallel": {**CONTEXT, "sharded_data_parallel_degree": 4}, **UNEVEN}),
    ("causal_lm", "zamba2", 2, {"data": {"sequence_length": 5}}),  # chunks shorter than what a convolution reads
    ("causal_lm", "mamba", 4, {"parallel": {**CONTEXT, "sharded_data_parallel_degree": 4}, **UNEVEN}),
    ("causal_lm", "mpt", 3, {"parallel": {"context_parallel_degree": 3}, **UNEVEN}),
    ("causal_lm", "mpt", 4, {"parallel": {**CONTEXT, "tensor_parallel_degree": 2}, **UNEVEN}),
    ("masked_lm", "albert", 2, {"data": {"sequence_length": 15}}),  # one block, which runs twice
    ("masked_lm", "deberta-v2", 2, {"data": {"sequence_length": 15}}),
    ("causal_lm", "falcon", 2, {**UNEVEN, "model": {"config": toy_config("falcon", alibi=True)}}),
    ("causal_lm", "doge", 2, UNEVEN),  # masks of numbers that it computes
    ("causal_lm", "gemma4_unified", 2, UNEVEN),  # masks of pictures
    ("causal_lm", "deepseek_v32", 2, UNEVEN),  # chooses the keys that a token looks at
    *(
        ("causal_lm", model_type, 2, {**UNEVEN, "model": {"config": toy_config(model_type, **config)}})
        for model_type, config in ANGLES_BY_LENGTH
    ),
    ("masked_lm", "esm", 2, {"data": {"sequence_length": 15}, "model": {
        "config": toy_config("esm", vocab_size=262, pad_token_id=1, mask_token_id=3, token_dropout=True)}}),
]  # fmt: skip


def split_job(directory: Path, task: str, model_type: str, settings: dict[str, Any]) -> Job:
    """The job of a sweep's toy on context ranks."""
    coverage.write_corpora(directory)
    sections = coverage.toy_job(directory, task, model_type, "context 2").model_dump(mode="json", exclude_unset=True)
    return Job.model_validate(
        {**sections, **{name: {**sections.get(name, {}), **own} for name, own in settings.items()}}
    )


QUICK: list[tuple[str, str, int, dict[str, Any]]] = [  # states go from rank to rank
    ("causal_lm", "mamba2", 2, UNEVEN),
    ("causal_lm", "mamba2", 2, {**UNEVEN, **FROZEN}),
]


@pytest.mark.parametrize(
    "task, model_type, ranks, settings", [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_rows_in_blocks_alone_agree_with_one_process(
    world_pool: WorldPool, tmp_path: Path, task: str, model_type: str, ranks: int, settings: dict[str, Any]
) -> None:
    job = split_job(tmp_path, task, model_type, settings)
    assert facts_of(job).split_forward is not None
    check_agrees(world_pool, ranks, job)


def positions_of_mixers(job: Job) -> set[int]:
    """Return how many positions mixers are given at once."""
    run, seen = set_up(job, torch.device("cpu")), set()
    forward = run.facts.split_forward
    assert forward is not None and forward.gathered
    for module in forward.gathered:
        mixer = run.model.module.get_submodule(module.name)
        mixer.register_forward_pre_hook(lambda _, args, kwargs: seen.add(args[0].shape[1]), with_kwargs=True)
        projection = next(part for part in mixer.modules() if isinstance(part, torch.nn.Linear))
        projection.register_forward_pre_hook(lambda _, args: seen.add(args[0].shape[1]))
    evaluate(run.model, run.objective, list(run.stream.evaluation(run.data.validation, 1)))
    return seen


@pytest.mark.slow
def test_a_mixer_sees_one_chunk_at_a_time(world_pool: WorldPool, tmp_path: Path) -> None:
    job = split_job(tmp_path, "causal_lm", "mamba2", {"data": {"sequence_length": 13, "validation_fraction": 0.2}})
    for seen in world_pool.run(2, positions_of_mixers, job):
        assert seen == {4, 8}  # a quarter of 13 and its padding, of a rank's half


SPANS: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel": CONTEXT, "model": {"attention": "auto"}, **FULL}),
    (4, {"parallel": {**CONTEXT, "tensor_parallel_degree": 2}, "dropout": 0.0, "model": {"attention": "auto"}}),
    (2, {"parallel": CONTEXT, "gated": True, "precision": {"compute": "fp32"},
         "optimizer": {"name": "SGD", "learning_rate": 0.1}}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks, settings", SPANS)
def test_a_t5_on_context_ranks_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, ranks: int, settings: dict[str, Any]
) -> None:
    """Sequences of encoder and decoder have lengths that the ranks do not divide; dropout is equal."""
    check_agrees(world_pool, ranks, span_job(corpora, **settings))


def evaluated_and_continued(job: Job) -> tuple[float, list[int]]:
    """Return the validation loss and what follows a prompt."""
    run = set_up(job, torch.device("cpu"))
    batches = list(run.stream.evaluation(run.data.validation, 1))
    loss = evaluate(run.model, run.objective, batches).loss
    return float(loss), generate(run.model, [1, 2, 3], 4, seed=3)


@pytest.mark.slow
def test_evaluation_and_generation(world_pool: WorldPool, tmp_path: Path) -> None:
    job = split_job(tmp_path, "causal_lm", "mpt", {"data": {"sequence_length": 13, "validation_fraction": 0.2}})
    alone = job.model_copy(update={"parallel": job.parallel.model_copy(update={"context_parallel_degree": 1})})
    loss, continued = world_pool.run(1, evaluated_and_continued, alone)[0]
    for loss_there, continued_there in world_pool.run(2, evaluated_and_continued, job):
        assert abs(loss_there - loss) <= 1e-9 * loss and continued_there == continued
