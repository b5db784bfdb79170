"""Documents of one sequence: changing one moves nothing of the next in every type, or the type is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.errors import LegalityError, ShardwiseError
from shardwise.job.schema import Job
from shardwise.job.tasks import IGNORED
from shardwise.plan.plan import World, resolve
from shardwise.testing.toy_configs import language_model_types, toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.setup import assemble, study

LENGTH, FIRST = 16, 7  # tokens of a sequence, and of its first document
MOVED = {"fp64": 1e-9, "fp32": 1e-5}
REFUSED = {
    "mamba2": "mixer of this mamba2 looks at other documents",
    "qwen3_next": "linear_attn of this qwen3_next looks at other documents",
    "lfm2_moe": "conv of this lfm2_moe looks at other documents",
    "rwkv": "attention of this rwkv looks at other documents",
    "mobilebert": "mobilebert is not known to look at other positions through masks",
    "esm": "esm multiplies its embeddings by its mask",
    "bart": "the decoder of bart looks at all of its encoder's sequence",
}
MASKED = ("bert", "mpnet", "mobilebert", "esm", "bart")


def documents_job(model_type: str, task: str, compute: str = "fp64") -> Job:
    return Job.model_validate(
        {
            "model": {"config": toy_config(model_type), "task": task, "dropout": 0.0},
            "data": {"sequence_length": LENGTH, "isolate_documents": True},
            "training": {"steps": 1, "sequences_per_step": 1, "microbatch_size": 1},
            "precision": {"compute": compute},
            "parallel": {"device": "cpu"},
        }
    )


def moved(job: Job) -> float:
    """Return by how much losses of the second document move with the tokens of the first. Run on the only rank."""
    made = assemble(job, torch.device("cpu"), study(job), None)
    objective = made.objective
    assert isinstance(objective, LanguageModelling)
    tokens = torch.randint(10, 90, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    changed = torch.cat([(tokens[:, :FIRST] + 7) % 80 + 10, tokens[:, FIRST:]], 1)
    places = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])[None]
    of_document = (torch.arange(LENGTH) >= FIRST).long()[None]
    labels = torch.cat([tokens[:, 1:], torch.full((1, 1), IGNORED)], 1)
    losses: list[Tensor] = []
    for ids in (tokens, changed):
        inputs = {"input_ids": ids, "position_ids": places}
        batch = Batch(inputs=inputs, labels=labels, rows=torch.arange(1), document_ids=of_document)
        made.model.run_ahead(objective, [batch], 0, lambda own, out: losses.append(objective.label_losses(own, out)))
    first, second = (values[:, FIRST:] for values in losses)
    assert first.abs().max() > 0
    return float((first - second).abs().max())


def outcome(job: Job) -> float | str:
    """Return by how much a document moves with another, or why the job is refused."""
    try:
        return moved(job)
    except ShardwiseError as error:
        return str(error)


def outcomes(task: str) -> dict[str, tuple[str, float | str]]:
    """Return dtype and outcome of every type, in fp32 where it does not compute in fp64. Run on the only rank."""
    found: dict[str, tuple[str, float | str]] = {}
    for model_type in language_model_types(task):
        for compute in MOVED:
            try:
                found[model_type] = compute, outcome(documents_job(model_type, task, compute))
            except Exception as error:  # transformers refuses the toy's config, by errors of several packages
                found[model_type] = compute, str(error)
            if not str(found[model_type][1]).startswith("precision.compute=fp64"):
                break
    return found


@pytest.mark.parametrize("model_type", ["llama", "bert", "mpnet", "doge", *REFUSED])
def test_documents_are_apart_or_refused(world_pool: WorldPool, model_type: str) -> None:
    job = documents_job(model_type, "masked_lm" if model_type in MASKED else "causal_lm")
    if model_type not in REFUSED:
        assert world_pool.run(1, moved, job)[0] <= MOVED["fp64"]
        return
    with pytest.raises(LegalityError, match=f"{REFUSED[model_type]}.*isolate_documents false"):
        resolve(job, World(1, "cpu", 1), study(job), None)


ALIBI = {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}


def test_falcons_bias_on_keys_keeps_documents_apart_but_in_eager_attention(world_pool: WorldPool) -> None:
    """transformers' own class, which eager attention keeps, makes the bias of a mask [B, S]."""
    job = documents_job("falcon", "causal_lm")
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": {**job.model.config, **ALIBI}})})
    assert world_pool.run(1, moved, job)[0] <= MOVED["fp64"]
    eager = job.model_copy(update={"model": job.model.model_copy(update={"attention": "eager"})})
    with pytest.raises(LegalityError, match=r"falcon keeps transformers' own attention here.*isolate_documents false"):
        resolve(eager, World(1, "cpu", 1), study(eager), None)


def test_chunks_are_counted_in_a_sequence_and_not_in_documents() -> None:
    """Llama 4's; an attention that sees chunks would not hide what it hides in a document alone."""
    config = toy_config("llama4_text", attention_chunk_size=100, max_position_embeddings=128)
    with pytest.raises(LegalityError, match=r"replace the model's chunks of 100; .* a sequence_length of at most 100"):
        resolve_model(config, {"sequence_length": 101, "isolate_documents": True})
    resolve_model(config, {"sequence_length": 101})
    resolve_model(config, {"sequence_length": 100, "isolate_documents": True})


def test_answers_of_one_prompt_share_a_sequence() -> None:
    rows = {"path": "p", "format": "preference", "sequence_length": LENGTH}
    with pytest.raises(LegalityError, match=r"linear_attn of this .*; use objective sft with packing false"):
        resolve_model(toy_config("qwen3_next"), {**rows, "packing": False})
    resolve_model(toy_config("qwen3_next"), {**rows, "packing": False}, objective="sft")


def resolve_model(config: dict[str, Any], data: dict[str, Any], **training: Any) -> None:
    job = Job.model_validate({"model": {"config": config}, "data": data, "training": {"steps": 1, **training}})
    resolve(job, World(1, "cpu", 1), study(job), None)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
def test_every_type_keeps_documents_apart_or_is_refused(world_pool: WorldPool, task: str) -> None:
    found = world_pool.run(1, outcomes, task, timeout=1800)[0]
    refused = [name for name, (_, answer) in found.items() if isinstance(answer, str)]
    leaks = {name: answer for name, answer in found.items() if name not in refused and answer[1] > MOVED[answer[0]]}
    assert leaks == {}
    assert len(found) - len(refused) > len(refused)
