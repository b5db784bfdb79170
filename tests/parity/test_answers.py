"""Answers that a model writes at an evaluation are those that plain transformers writes in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from shardwise.job.schema import Job
from shardwise.observe.metrics import read_metrics
from shardwise.testing.world import WorldPool
from shardwise.training.sample import continue_greedily
from shardwise.training.session import Session
from shardwise.training.trainer import train_rank
from tests.data.chats import BLOCKS, END, byte_tokenizer, write_rows

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 4": (4, {}),
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
}
CONFIG = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 13, "max_position_embeddings": 32,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [7, 6, 5]]


def answer_job(directory: Path, **sections: dict[str, Any]) -> Job:
    """Conversations whose answer is `no` but for every fourth, which a model learns never to give."""
    byte_tokenizer(directory / "tokenizer", BLOCKS)
    turns = [(f"{number}?", "no" if number % 4 else "y") for number in range(40)]
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in turns
    ]
    data = {
        "path": str(write_rows(directory / "rows.jsonl", rows)), "tokenizer": str(directory / "tokenizer"),
        "cache_directory": str(directory / "cache"), "sequence_length": 32, "validation_fraction": 0.3,
        "format": "chat",
    }  # fmt: skip
    base: dict[str, Any] = {
        "model": {"config": CONFIG}, "parallel": {"device": "cpu"}, "precision": {"compute": "fp64"}, "data": data,
        "training": {"steps": 25, "sequences_per_step": 8}, "optimizer": {"learning_rate": 2e-2},
        "evaluation": {"answers": 10}, "observe": {"tensorboard": False, "sample": False},
    }  # fmt: skip
    return Job.model_validate({**base, **sections})


def evaluated(job: Job) -> tuple[dict[str, Any], list[list[int]], Any, dict[str, torch.Tensor]]:
    """Train, evaluate and continue the prompts; return also the answers that were asked for, and the weights."""
    with Session(job, device=torch.device("cpu")) as session:
        for batches in session.batches():
            session.step(batches)
        session.evaluate()
        asked = session.assembled.data.validation.answers(10)  # type: ignore[union-attr]
        written = continue_greedily(session.model, PROMPTS, 6)
        weights = {name: tensor.clone() for name, tensor in session.model.whole_tensors()}
        return session.evaluated, written, asked, weights


@torch.no_grad()
def plainly(weights: dict[str, torch.Tensor], prompt: list[int], tokens: int) -> list[int]:
    """Return the likeliest tokens behind a prompt, by the model that transformers builds."""
    values = dict(CONFIG)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[str(values.pop("model_type"))](**values)).double().eval()
    model.load_state_dict(weights)
    ids = torch.tensor([prompt])
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids[:, -32:]).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [int(token) for token in ids[0, len(prompt) :]]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "compute"), [*((layout, "fp64") for layout in LAYOUTS), ("pipeline 2", "fp32")])
def test_exact_match(world_pool: WorldPool, tmp_path: Path, layout: str, compute: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    job = answer_job(tmp_path, parallel={"device": "cpu", **parallel}, precision={"compute": compute})
    record, written, asked, weights = world_pool.run(ranks, evaluated, job)[0]
    assert written == [plainly(weights, prompt, 6) for prompt in PROMPTS]
    right = [plainly(weights, prompt, len(answer)) == answer for prompt, answer in asked]
    assert record["exact_match"] == sum(right) / 10
    assert 0 < sum(right) < 10


def train(job: Job) -> None:
    Path(job.output).mkdir()
    train_rank(job, torch.device("cpu"))


def test_prompts_are_continued_at_an_evaluation(world_pool: WorldPool, tmp_path: Path) -> None:
    evaluation = {"prompts": ["3?", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "5?"}]]}
    observe = {"tensorboard": False, "sample": False, "sample_tokens": 3}
    training = {"steps": 1, "sequences_per_step": 4, "evaluate_batches": 1}
    job = answer_job(tmp_path, evaluation={**evaluation, "answers": 2}, observe=observe, training=training)
    job = job.model_copy(update={"output": str(tmp_path / "run")})
    world_pool.run(1, train, job)
    record = next(record for record in read_metrics(tmp_path / "run/metrics.jsonl") if "samples" in record)
    assert 0 <= record["exact_match"] <= 1
    assert [sample["prompt"] for sample in record["samples"]] == [
        f"[user]3?{END}[assistant]",
        f"[system]Be brief.{END}[user]5?{END}[assistant]",
    ]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert all(len(tokenizer.encode(sample["text"])) <= 3 for sample in record["samples"])
    assert "Prompts at the last evaluation" in (tmp_path / "run/report.html").read_text()


def test_exact_match_of_several_sources_is_of_all_their_rows(world_pool: WorldPool, tmp_path: Path) -> None:
    job = answer_job(tmp_path, training={"steps": 25, "sequences_per_step": 8, "evaluate_batches": 1})
    few = tmp_path / "few.jsonl"
    few.write_text("".join((tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)[:9]))
    sources = [
        {"name": name, "path": str(tmp_path / file), "format": "chat", "weight": 1.0}
        for name, file in (("many", "rows.jsonl"), ("few", few))
    ]
    data = job.data.model_dump(exclude_unset=True, exclude={"path", "format"}) | {"sources": sources}
    mixed = Job.model_validate(job.model_dump(exclude_unset=True) | {"data": data})
    record, many, few_rows = world_pool.run(1, exact_matches_of, mixed)[0]
    assert (many, few_rows) == (10, 2)
    whole = record["exact_match/many"] * many + record["exact_match/few"] * few_rows
    assert record["exact_match"] == pytest.approx(whole / (many + few_rows))
    assert 0 < record["exact_match"] < 1


def exact_matches_of(job: Job) -> tuple[dict[str, Any], int, int]:
    """Train and evaluate; return also of how many rows of each source answers are asked for."""
    with Session(job, device=torch.device("cpu")) as session:
        for batches in session.batches():
            session.step(batches)
        session.evaluate()
        sets = session.assembled.data.sets
        many, few = (len(sets[name].answers(10)) for name in ("many", "few"))  # type: ignore[union-attr]
        return session.evaluated, many, few
