"""Context parallelism against one process: three ways, uneven sequences, documents, dropout, windows, grouped heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.job.schema import Job
from shardwise.kernels.dropout import DropoutScope, dropout_scope
from shardwise.testing.world import WorldPool
from shardwise.training.sample import generate
from shardwise.training.setup import AssembledJob, set_up
from shardwise.training.step import evaluate, train_step
from tests.parity.jobs import VOCABULARY, check_agrees, tensor_job, verify_one

UNEVEN: dict[str, Any] = {"data": {"sequence_length": 13}}
DOCUMENTS: dict[str, Any] = {"data": {"sequence_length": 13, "isolate_documents": True}}
FP32: dict[str, Any] = {"precision": {"compute": "fp32"}, "optimizer": {"name": "SGD", "learning_rate": 0.1}}
STAGES = {"pipeline_parallel_degree": 2}
FOUR: dict[str, Any] = {"training": {"sequences_per_step": 8, "microbatch_size": 2}}
WAYS = ("all_gather", "ulysses", "ring")
# In fp64 the eager attention of these (and of OPT) takes its softmax in fp32; their fused one does not.
FUSED = ("gpt_neox", "llama", "mistral", "qwen3", "gemma")


def context_job(
    directory: str | Path, family: str, method: str, degree: int = 2, *, config: dict[str, Any] | None = None,
    attention: str | None = None, parallel: dict[str, Any] | None = None, **settings: Any,
) -> Job:  # fmt: skip
    """The job of `tensor_job` on `degree` context ranks; `config` adds to the model's."""
    context = {"context_parallel_degree": degree, "context_parallel_method": method if degree > 1 else "auto"}
    job = tensor_job(directory, family, parallel={**context, **(parallel or {})}, **settings)
    assert isinstance(job.model.config, dict)
    attention = attention or ("sdpa" if family in FUSED else "eager")
    update = {"config": {**job.model.config, **(config or {})}, "attention": attention}
    return job.model_copy(update={"model": job.model.model_copy(update=update)})


GEMMA2 = {"model_type": "gemma2", "sliding_window": 4, "query_pre_attn_scalar": 8}  # and a soft cap, by default
ESM = {"model_type": "esm", "pad_token_id": 1, "mask_token_id": 3, "max_position_embeddings": 18}
SLOW: list[tuple[str, int, str, int, dict[str, Any]]] = [
    ("gpt2", 4, "ring", 4, {"attention": "sdpa"}),
    ("gpt2", 4, "all_gather", 4, {"dropout": 0.1}),
    ("gpt2", 4, "ulysses", 4, {"attention": "sdpa"}),
    ("gpt2", 2, "ring", 2, {"attention": "sdpa", "tied": False, **UNEVEN}),
    ("gpt_neox", 2, "ulysses", 2, UNEVEN),
    ("llama", 2, "all_gather", 2, UNEVEN),
    ("opt", 2, "ulysses", 2, {"attention": "sdpa", **DOCUMENTS}),
    ("bert", 2, "ulysses", 2, {"dropout": 0.1, **UNEVEN}),
    ("roberta", 2, "all_gather", 2, UNEVEN),
    ("roberta", 2, "all_gather", 2, {"config": ESM, **UNEVEN}),
    ("mistral", 2, "all_gather", 2, {"config": {"sliding_window": 4}, **UNEVEN}),
    ("qwen3", 2, "ring", 2, {"training": {"sequences_per_step": 6, "microbatch_size": 2}}),
    ("gpt2", 4, "ring", 2, {"parallel": {"tensor_parallel_degree": 2}, "dropout": 0.1}),
    ("bert", 4, "all_gather", 2, {"parallel": {"tensor_parallel_degree": 2}, "dropout": 0.1}),
    ("llama", 4, "ulysses", 2, {"parallel": STAGES, "memory": {"activation_checkpointing": "full"}, **UNEVEN, **FOUR}),
    ("bert", 4, "auto", 2, {"parallel": STAGES, "dropout": 0.1, **DOCUMENTS, **FOUR}),
    ("mistral", 2, "ulysses", 2, {"config": {"sliding_window": 4}, **UNEVEN}),
    ("bert", 2, "all_gather", 2, {"dropout": 0.1, **UNEVEN}),
    ("roberta", 2, "ring", 2, {"attention": "sdpa"}),
    ("gpt2", 8, "ring", 2, {"parallel": {"tensor_parallel_degree": 2, "placement_strategy": "spread"}, "dropout": 0.1}),
    ("gpt2", 4, "ulysses", 2, {"parallel": {"sharded_data_parallel_degree": 2}, "dropout": 0.1}),
    ("gpt_neox", 2, "all_gather", 2, {"dropout": 0.1, **DOCUMENTS, **FP32, "attention": "eager"}),
    ("llama", 2, "ring", 2, {"memory": {"activation_checkpointing": "selective"}, **UNEVEN}),
    ("mistral", 2, "ring", 2, {"config": {"sliding_window": 4}, **UNEVEN}),
    ("opt", 2, "ring", 2, {"dropout": 0.1, **UNEVEN, **FP32}),
    ("bert", 2, "ring", 2, {"dropout": 0.1, **DOCUMENTS}),
    ("gpt_neo", 2, "ring", 2, {"attention": "auto", **UNEVEN, **FP32}),
    ("bloom", 2, "all_gather", 2, {"attention": "auto", **DOCUMENTS, **FP32}),
    ("bloom", 4, "auto", 2, {"parallel": {"tensor_parallel_degree": 2}, "attention": "auto", **UNEVEN, **FP32}),
    ("gpt2", 4, "all_gather", 2, {"training": {"sequences_per_step": 7}, **UNEVEN}),  # shard 2 as well
    ("gemma", 2, "all_gather", 2, {"config": GEMMA2, "attention": "eager", **UNEVEN, **FP32}),
    ("mistral", 2, "all_gather", 2, {"attention": "auto", "config": {"sliding_window": 4}, **DOCUMENTS}),
    ("bloom", 2, "ulysses", 2, {"attention": "auto", "dropout": 0.1, **UNEVEN, **FP32}),
    ("gpt2", 4, "ring", 2, {"parallel": {"shard_optimizer_state": True}, "dropout": 0.1}),
    ("gpt_neox", 2, "ring", 2, {"precision": {"compute": "bf16"}}),
    ("llama", 4, "ring", 4, {"precision": {"compute": "fp16"}, **DOCUMENTS}),
    ("falcon", 2, "ulysses", 2, {"attention": "auto", **DOCUMENTS}),
    ("gpt2", 4, "ulysses", 2, {"parallel": {"tensor_parallel_degree": 2}, "dropout": 0.1, **UNEVEN}),
]  # fmt: skip
CASES: list[tuple[str, int, str, int, dict[str, Any]]] = [  # family, ranks, method, degree, settings
    ("gpt2", 2, "all_gather", 2, {"dropout": 0.1, **UNEVEN}),
    ("gpt2", 2, "ulysses", 2, {"dropout": 0.1, **DOCUMENTS}),
    ("gpt2", 2, "ring", 2, {"dropout": 0.1, **UNEVEN}),
    ("llama", 2, "ulysses", 2, {"memory": {"activation_checkpointing": "full"}, **DOCUMENTS}),
    ("gemma", 2, "ring", 2, {"memory": {"activation_checkpointing": "full", "offload_activations": True}, **DOCUMENTS}),
    ("gpt2", 2, "ring", 2, {"dropout": 0.1, "memory": {
        "activation_checkpointing": "full", "checkpoint_strategy": "group_2", "offload_activations": True,
        "offload_parameters": True}, **DOCUMENTS}),
    ("bert", 2, "auto", 2, {"dropout": 0.1, "memory": {"activation_checkpointing": "selective"},
                            "training": {"sequences_per_step": 5, "microbatch_size": 2}, **DOCUMENTS}),
    ("gptj", 2, "ring", 2, {"attention": "auto", **DOCUMENTS, **FP32}),
    ("gpt_neo", 2, "all_gather", 2, {"attention": "auto", "dropout": 0.1, **DOCUMENTS, **FP32}),
    ("bloom", 2, "ring", 2, {"attention": "auto", "dropout": 0.1, **DOCUMENTS, **FP32}),
    ("mistral", 2, "ring", 2, {"attention": "auto", "config": {"sliding_window": 4}, **DOCUMENTS}),
    ("gpt2", 2, "all_gather", 2, {"attention": "blockwise", "dropout": 0.1, **DOCUMENTS}),
]  # fmt: skip
TOGETHER: list[tuple[str, int, str, int, dict[str, Any]]] = [
    ("llama", 4, "all_gather", 2, {"parallel": {"tensor_parallel_degree": 2}, **UNEVEN}),
    ("gpt2", 4, "ring", 2, {"parallel": STAGES, "dropout": 0.1, **DOCUMENTS, **FOUR}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family, ranks, method, degree, settings",
    [*CASES, *TOGETHER, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_agrees_with_one_process(
    world_pool: WorldPool, corpora: Path, family: str, ranks: int, method: str, degree: int, settings: dict[str, Any]
) -> None:
    check_agrees(world_pool, ranks, context_job(corpora, family, method, degree, **settings))


FAMILIES = ("gpt_neox", "llama", "mistral", "qwen3", "gemma", "opt", "bert", "roberta")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_context_tensor_and_shard(world_pool: WorldPool, corpora: Path, family: str) -> None:
    """Context 2 x tensor 2 x shard 2, where two key-value heads leave one to a rank: all_gather or ring."""
    settings: dict[str, Any] = {"parallel": {"tensor_parallel_degree": 2}, "attention": "sdpa", **UNEVEN}
    for method in ("all_gather", "ring"):
        report = world_pool.run(8, verify_one, context_job(corpora, family, method, **settings))[0]
        assert report is not None
        assert report.agrees, (report.first, report.diagnosis)


def outputs(run: AssembledJob, batch: Batch) -> Tensor:
    """[B, S/c, H] hidden states of this rank's rows."""
    assert run.model.context is not None
    part, shard = run.model.context.split(batch)
    with torch.no_grad(), dropout_scope(DropoutScope(0, 0, part.rows, sequences=shard)):
        hidden: Tensor = run.model.module(**run.objective.inputs(part)).logits
    return hidden


def perturbed(job: Job) -> tuple[bool, bool]:
    """Change a token of one document: (did any output of another document change, did any of its own)."""
    run = set_up(job, torch.device("cpu"))
    run.model.module.eval()
    batch = run.stream.batches(0)[0]
    documents = batch.document_ids
    assert documents is not None
    row = int(documents.amax(1).argmax())
    place = int((documents[row] == 1).nonzero()[0])  # the first token of the second document
    ids = batch.inputs["input_ids"].clone()
    ids[row, place] = (ids[row, place] + 1) % VOCABULARY
    before, after = outputs(run, batch), outputs(run, replace(batch, inputs={**batch.inputs, "input_ids": ids}))
    assert run.model.context is not None
    positions = run.model.context.split(batch)[1].positions
    real = positions < documents.shape[1]
    own = documents[:, positions.clamp(max=documents.shape[1] - 1)] == 1
    own &= torch.arange(len(ids)).unsqueeze(1) == row
    changed = (before != after).any(-1) & real
    return bool((changed & ~own).any()), bool((changed & own).any())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", WAYS)
def test_no_document_sees_another(world_pool: WorldPool, corpora: Path, method: str) -> None:
    found = world_pool.run(2, perturbed, context_job(corpora, "llama", method, **DOCUMENTS))
    assert not any(others for others, _ in found)
    assert any(own for _, own in found)


def used(job: Job) -> tuple[list[int], float, int]:
    """A generated text, a validation loss, and the tokens counted in one step."""
    run = set_up(job, torch.device("cpu"))
    text = generate(run.model, [1, 2, 3], 8, seed=3)
    loss = evaluate(run.model, run.objective, list(run.stream.evaluation(run.data.validation, 1))).loss
    step = train_step(run.model, run.objective, run.stream.batches(0), run.optimizer, run.scaler, 0)
    return text, loss, step.count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", WAYS)
def test_generation_evaluation_and_count(world_pool: WorldPool, corpora: Path, method: str) -> None:
    """Generation runs on whole sequences, every token counts once."""
    text, loss, count = world_pool.run(1, used, context_job(corpora, "gpt2", method, 1, **UNEVEN))[0]
    for found in world_pool.run(2, used, context_job(corpora, "gpt2", method, **UNEVEN)):
        assert (found[0], found[2]) == (text, count)
        assert found[1] == pytest.approx(loss, rel=1e-9)
