"""Sets that are evaluated beside the validation split have the loss that plain transformers gives them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shardwise.data.prepare import prepare
from shardwise.errors import ConfigError, DataError
from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from shardwise.training.setup import prepare_data, study
from tests.parity.jobs import LENGTH, VOCABULARY, tensor_job

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 4": (4, {}),
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "context 2": (2, {"context_parallel_degree": 2}),
}


def write_set(path: Path, tokens: int, seed: int) -> list[int]:
    """Write documents of token ids; return all of them in a row."""
    draw = random.Random(seed)
    ids = [draw.randrange(VOCABULARY) for _ in range(tokens)]
    path.write_text("".join(json.dumps({"input_ids": ids[at : at + 17]}) + "\n" for at in range(0, tokens, 17)))
    return ids


def evaluated(job: Job) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train a step and evaluate; return the record and the whole weights."""
    with Session(job, device=torch.device("cpu")) as session:
        session.step(next(iter(session.batches())))
        session.evaluate()
        return session.evaluated, {name: tensor.clone() for name, tensor in session.model.whole_tensors()}


@torch.no_grad()
def plain_loss(job: Job, weights: dict[str, torch.Tensor], ids: list[int]) -> float:
    """Return the mean loss over whole windows of ids, of the model that transformers builds."""
    values = dict(job.model.config)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[values.pop("model_type")](**values)).double().eval()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    count = (len(ids) - 1) // LENGTH
    windows = torch.tensor([ids[at * LENGTH : at * LENGTH + LENGTH + 1] for at in range(count)])
    logits = model(windows[:, :-1]).logits
    return float(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


@pytest.mark.parametrize(
    "layout", [name if name == "tensor 2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_sets(world_pool: WorldPool, corpora: Path, tmp_path: Path, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    ids = {name: write_set(tmp_path / f"{name}.jsonl", size, size) for name, size in (("short", 55), ("long", 410))}
    sets = {name: str(tmp_path / f"{name}.jsonl") for name in ids}
    job = tensor_job(corpora, "gpt2", layers=2, parallel=parallel, evaluation={"sets": sets})
    record, weights = world_pool.run(ranks, evaluated, job)[0]
    for name, tokens in ids.items():
        assert record[f"validation_loss/{name}"] == pytest.approx(plain_loss(job, weights, tokens), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing", None, "evaluation.sets.missing: data.path="),
        ("tiny", '{"input_ids": [1, 2, 3]}\n', "evaluation.sets.tiny: the data set has 3 tokens: too few"),
    ],
)
def test_a_set_that_cannot_be_used_is_named(
    corpora: Path, tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    path = tmp_path / f"{name}.jsonl"
    if content is not None:
        path.write_text(content)
    job = tensor_job(corpora, "gpt2", layers=1, evaluation={"sets": {name: str(path)}})
    with pytest.raises(DataError) as raised:
        prepare_data(job, study(job))
    assert words in str(raised.value)


def test_a_set_may_have_the_name_of_a_split(corpora: Path, tmp_path: Path) -> None:
    write_set(tmp_path / "set.jsonl", 410, 410)
    plain = prepare(tensor_job(corpora, "gpt2", layers=1)).describe()
    sets = {name: str(tmp_path / "set.jsonl") for name in ("training", "validation")}
    facts = prepare(tensor_job(corpora, "gpt2", layers=1, evaluation={"sets": sets})).describe()
    assert facts == {**plain, "sets": dict.fromkeys(sets, 409 // LENGTH)}


def test_a_key_that_a_set_cannot_have_is_named_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "one two three four five six"}\n' * 20)
    (tmp_path / "b.txt").write_text("one two three four five six\n" * 20)
    data = {"path": str(tmp_path / "a.jsonl"), "field": "content", "vocabulary_size": 300, "sequence_length": 16}
    data |= {"cache_directory": str(tmp_path / "cache")}
    with pytest.raises(ConfigError, match=r"^evaluation.sets.b: data.field='content' with data.format=text"):
        prepare(Job(data=data, evaluation={"sets": {"b": str(tmp_path / "b.txt")}}))
