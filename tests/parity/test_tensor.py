"""Tensor parallelism against one process: fused projections, grouped heads, uneven MLPs, with sharding and replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import coverage
from shardwise.job.schema import Job
from shardwise.testing.capture import gather
from shardwise.testing.world import WorldPool
from shardwise.training.sample import generate
from shardwise.training.setup import set_up
from shardwise.training.step import train_step
from tests.parity.jobs import check_agrees, facts_of, span_job, t5_job, tensor_job

TWO = {"tensor_parallel_degree": 2}
FOUR = {"tensor_parallel_degree": 4}
FP32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"name": "SGD", "learning_rate": 0.1}}
# Falcon's first models: a head's query, key and value beside each other, biases by position, branches in sequence.
ALIBI: dict[str, Any] = {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "parallel_attn": False,
         "num_kv_heads": 4}  # fmt: skip
# falcon-7b: one key-value head, fused behind the queries.
ONE_HEAD: dict[str, Any] = {"new_decoder_architecture": False, "multi_query": True, "hidden_size": 32}
SLOW: list[tuple[str, int, dict[str, Any]]] = [
    ("falcon", 4, {"parallel": FOUR, "config": ONE_HEAD, "dropout": 0.1}),
    ("gptj", 4, {"parallel": FOUR, "dropout": 0.1, **FP32}),  # its attention computes in fp32
    ("bert", 4, {"parallel": FOUR, "dropout": 0.1}),
    ("gpt_neo", 2, {"parallel": TWO, "dropout": 0.1}),
    ("gemma", 2, {"parallel": TWO, "memory": {"activation_checkpointing": "full", "offload_activations": True}}),
    ("gpt2", 4, {"parallel": FOUR}),
    ("gpt2", 6, {"parallel": TWO, "memory": {"activation_checkpointing": "full"}}),
    ("gpt_neox", 8, {"parallel": {**FOUR, "placement_strategy": "spread"}}),
    ("llama", 2, {"parallel": TWO, "tied": False}),
    ("mistral", 4, {"parallel": FOUR}),
    ("qwen3", 4, {"parallel": TWO}),
    ("llama", 4, {"parallel": TWO, "training": {"sequences_per_step": 7, "microbatch_size": 1}}),
    ("mistral", 4, {"parallel": FOUR, "config": {"num_key_value_heads": 1}}),
    ("falcon", 4, {"parallel": TWO, "dropout": 0.1}),
    ("falcon", 2, {"parallel": TWO, "config": ALIBI, "model": {"attention": "sdpa"}}),
    ("opt", 4, {"parallel": TWO, "dropout": 0.1}),
    ("roberta", 4, {"parallel": TWO}),
    ("gpt_neox", 4, {"parallel": TWO, "precision": {"compute": "bf16"}}),
    ("qwen3", 8, {"parallel": FOUR, "training": {"microbatch_size": 1}, **FP32}),  # its norms compute in fp32
    ("falcon", 4, {"parallel": {**TWO, "sequence_parallel": True}, "config": ONE_HEAD, **FP32}),
    ("gpt2", 8, {"parallel": {**TWO, "sharded_data_parallel_degree": 2}, "dropout": 0.1}),
    ("gemma", 8, {"parallel": {**FOUR, "sharded_data_parallel_degree": 1, "sequence_parallel": True}}),
    ("bloom", 4, {"parallel": FOUR, "dropout": 0.1, **FP32}),
    ("falcon", 4, {"parallel": {**FOUR, "sequence_parallel": True}, "dropout": 0.1, **FP32}),
    ("gpt2", 2, {"parallel": TWO, "dropout": 0.1}),
    ("llama", 4, {"parallel": TWO, "precision": {"compute": "fp16"}}),
    ("qwen3", 2, {"parallel": TWO, "training": {"sequences_per_step": 6, "microbatch_size": 2}}),
]  # fmt: skip
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt2", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 2}, "dropout": 0.1}),
    ("gpt2", 4, {"parallel": {**TWO, "shard_optimizer_state": True}, "tied": False}),
    ("gpt_neox", 2, {"parallel": TWO, "dropout": 0.1}),
    ("llama", 4, {"parallel": TWO, "memory": {"activation_checkpointing": "selective"}}),
    ("llama", 4, {"parallel": FOUR, "tied": False}),  # 2 key-value heads, each on 2 ranks
    ("gemma", 4, {"parallel": {**FOUR, "sequence_parallel": True}}),
    ("bloom", 2, {"parallel": {**TWO, "sequence_parallel": True}, "dropout": 0.1, **FP32}),  # its attention: fp32
    ("falcon", 2, {"parallel": {**TWO, "sequence_parallel": True}, "config": ALIBI, "dropout": 0.1}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family, ranks, settings", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, family: str, ranks: int, settings: dict[str, Any]
) -> None:
    check_agrees(world_pool, ranks, tensor_job(corpora, family, **settings))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "ranks, settings",
    [
        (2, {"parallel": TWO, **FP32}),
        (4, {"parallel": FOUR, "tied": False, "gated": True, **FP32}),
        pytest.param(
            *(4, {"parallel": TWO, "dropout": 0.0, "memory": {"activation_checkpointing": "full"}, **FP32}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_encoder_and_a_decoder_agree_with_one_process(
    world_pool: WorldPool, corpora: Path, ranks: int, settings: dict[str, Any]
) -> None:
    """T5: relative position biases by head, which the first block of a stack makes for all; cross-attention."""
    check_agrees(world_pool, ranks, t5_job(corpora, **settings))


SPANS = [
    (4, {"parallel": {**TWO, "sharded_data_parallel_degree": 2}, "training": {"sequences_per_step": 7}, **FP32}),
    (2, {"tied": False, "gated": True, "memory": {"activation_checkpointing": "full"}, **FP32}),
    (4, {"parallel": FOUR, "dropout": 0.0, "model": {"attention": "auto"}, **FP32}),
    (3, {"precision": {"compute": "bf16"}}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks, settings", SPANS)
def test_a_t5_of_a_config_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, ranks: int, settings: dict[str, Any]
) -> None:
    check_agrees(world_pool, ranks, span_job(corpora, **settings))


# Models whose heads stay whole: two stacks, fused projections; dropout of attention too.
GATHERED = [
    ("seq2seq_lm", "bart", 2, {"parallel": TWO}),
    ("masked_lm", "electra", 4, {"parallel": {**TWO, "pipeline_parallel_degree": 2}}),
    ("causal_lm", "mpt", 3, {"parallel": {"tensor_parallel_degree": 3}}),  # which divides no size
    ("causal_lm", "phi3", 4, {"parallel": {**TWO, "context_parallel_degree": 2}, "model": {"attention": "auto"}}),
    ("causal_lm", "mpt", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 2}}),
    ("causal_lm", "gpt_bigcode", 2, {"parallel": TWO, "memory": {"activation_checkpointing": "full"}}),
    ("causal_lm", "phi3", 2, {"parallel": TWO, "adapter": {"kind": "lora", "rank": 4}}),
    ("causal_lm", "mpt", 2, {"parallel": TWO, **FP32, "precision": {"compute": "bf16"}}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("task, model_type, ranks, settings", GATHERED)
def test_layers_that_are_split_by_outputs_agree_with_one_process(
    world_pool: WorldPool, tmp_path: Path, task: str, model_type: str, ranks: int, settings: dict[str, Any]
) -> None:
    coverage.write_corpora(tmp_path)
    job = coverage.toy_job(tmp_path, task, model_type, coverage.CONTROL)
    sections = job.model_dump(mode="json", exclude_unset=True)
    dropout = 0.1 if "auto" not in str(settings) and model_type not in ("phi3", "mpt") else None
    sections["model"] |= {"dropout": dropout, **settings.get("model", {})}
    changed = {**sections, **{name: {**sections.get(name, {}), **own} for name, own in settings.items()}}
    job = Job.model_validate(changed)
    assert facts_of(job).heads_whole
    check_agrees(world_pool, ranks, job)


def initial(job: Job) -> dict[str, Tensor]:
    return gather(set_up(job, torch.device("cpu")))


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("gpt2", "gpt_neox"))]
)
def test_initial_weights_are_bit_equal(world_pool: WorldPool, corpora: Path, family: str) -> None:
    alone = world_pool.run(1, initial, tensor_job(corpora, family))[0]
    for ranks, parallel in ((2, TWO), (4, TWO), (4, FOUR)):
        found = world_pool.run(ranks, initial, tensor_job(corpora, family, parallel=parallel))[0]
        assert list(found) == list(alone)
        assert all(torch.equal(found[name], alone[name]) for name in alone)


def kept(job: Job) -> tuple[int, int]:
    """Elements on this rank, and of the whole model."""
    run = set_up(job, torch.device("cpu"))
    return sum(entry.local.numel() for entry in run.model.tensor_map), run.facts.parameters


def test_a_rank_keeps_its_part(world_pool: WorldPool, corpora: Path) -> None:
    """Positions, norms and the biases of sums are everywhere; the rest is split."""
    everywhere = 16 * 24 + 24 * 2 + 2 * (4 * 24 + 2 * 24)
    parts = world_pool.run(4, kept, tensor_job(corpora, "gpt2", parallel=FOUR))
    assert sum(here for here, _ in parts) == parts[0][1] + 3 * everywhere


def norms(job: Job) -> float:
    """Gradient norm of a first step."""
    run = set_up(job, torch.device("cpu"))
    return train_step(run.model, run.objective, run.stream.batches(0), run.optimizer, run.scaler, 0).grad_norm


def test_a_head_in_copies_counts_once_in_the_norm(world_pool: WorldPool, corpora: Path) -> None:
    alone = world_pool.run(1, norms, tensor_job(corpora, "llama"))[0]
    assert world_pool.run(4, norms, tensor_job(corpora, "llama", parallel=FOUR)) == pytest.approx([alone] * 4, rel=1e-9)


def from_directory(job: Job) -> dict[str, Tensor]:
    return gather(set_up(job, torch.device("cpu")))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_directory_is_read_by_slices(world_pool: WorldPool, corpora: Path, tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = tensor_job(corpora, family).model.config
    assert isinstance(settings, dict)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.save_pretrained(tmp_path)
    job = tensor_job(corpora, family, parallel=FOUR if family == "llama" else TWO)
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": None, "path": str(tmp_path)})})
    found = world_pool.run(4, from_directory, job)[0]
    expected = dict(model.named_parameters())
    assert all(torch.equal(value, expected[name].double()) for name, value in found.items())


def generated(job: Job) -> list[int]:
    run = set_up(job, torch.device("cpu"))
    return generate(run.model, [1, 2, 3], 8, seed=3)


@pytest.mark.slow
def test_generation_sees_whole_logits(world_pool: WorldPool, corpora: Path) -> None:
    alone = world_pool.run(1, generated, tensor_job(corpora, "gpt2"))[0]
    for parallel in (TWO, {**TWO, "sequence_parallel": True}):  # the text grows, and its parts with it
        assert world_pool.run(4, generated, tensor_job(corpora, "gpt2", parallel=parallel)) == [alone] * 4
