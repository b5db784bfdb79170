"""Samples of `data.factory` for models of transformers: labels stand and count as they do there, or are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, T5ForConditionalGeneration

from shardwise.errors import ConfigError, DataError
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import _labels_next_tokens
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from tests.parity.jobs import check_agrees, make_module_job
from tests.parity.test_classification import Labelled, class_job

WIDTH = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 13}
CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": 40, "num_hidden_layers": 2, **WIDTH}


class Texts:
    """Rows of token ids that are their own labels, but for the first few of each."""

    def __init__(self, size: int = 32, length: int = 12) -> None:
        self.ids = torch.randint(0, 40, (size, length), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index].clone()
        labels[: 1 + index % 4] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def text_job(directory: Path, **sections: Any) -> Job:
    base: dict[str, Any] = {
        "model": {"config": {**CONFIG, "max_position_embeddings": 12}, "factory": None, "loss": None},
        "data": {"factory": f"{__name__}:Texts", "sequence_length": 12, "validation_fraction": 0.25},
        "training": {"steps": 2, "sequences_per_step": 4, "microbatch_size": 2, "evaluate_batches": 2},
    }
    return make_module_job(directory, **{**base, **sections})


def evaluated(job: Job) -> tuple[float, dict[str, Tensor]]:
    with Session(job, device=torch.device("cpu")) as session:
        loss = session.evaluate()
        return loss, {name: tensor.clone() for name, tensor in session.model.whole_tensors()}


def test_labels_stand_at_their_own_token_as_in_transformers(world_pool: WorldPool, tmp_path: Path) -> None:
    [(loss, weights)] = world_pool.run(1, evaluated, text_job(tmp_path))
    values = {**CONFIG, "max_position_embeddings": 12}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[values.pop("model_type")](**values)).double().eval()
    model.load_state_dict(weights, strict=False)
    rows = [Texts()[index] for index in range(24, 32)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        assert loss == pytest.approx(float(model(**batch).loss), rel=1e-6)  # which takes logits in fp32


def test_the_oracle_reads_them_so_too(world_pool: WorldPool, tmp_path: Path) -> None:
    check_agrees(world_pool, 2, text_job(tmp_path, parallel={"device": "cpu", "pipeline_parallel_degree": 2}))


class OfKind(Labelled):
    """Labels that are no classes of the model, by the word that says how."""

    def __init__(self, of_tokens: bool, kind: str) -> None:
        super().__init__(of_tokens)
        self.kind = kind

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        label = sample["labels"]
        kinds = {"float": label.double(), "several": torch.zeros(3, dtype=torch.int64), "outside": label + 7}
        return {**sample, "labels": kinds.get(self.kind, label.to(torch.int32))}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("float", r"has labels of torch\.float64 and shape \[\], and the task takes one whole number"),
        ("several", r"has labels of torch\.int64 and shape \[3\], and the task takes one whole number"),
        ("outside", r"has the class \d, and the model's are 0 to 2; give model\.labels a name for each"),
        ("int32", ""),
    ],
)
def test_labels_that_are_no_classes_are_named(world_pool: WorldPool, tmp_path: Path, kind: str, said: str) -> None:
    arguments = {"of_tokens": False, "kind": kind}
    data = {"factory": f"{__name__}:OfKind", "factory_arguments": arguments}
    job = class_job("gpt2", "sequence_classification", tmp_path, data=data)
    [loss, refusal] = world_pool.run(1, first_step, job)[0]
    assert re.search(said, refusal) if said else loss > 0


def first_step(job: Job) -> tuple[float, str]:
    try:
        with Session(job, device=torch.device("cpu")) as session:
            return session.step(next(iter(session.batches()))).loss, ""
    except DataError as error:
        return 0.0, str(error)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_labels": 1}, "num_labels=1 of the model's config: two classes at least"),
        ({"problem_type": "regression"}, "problem_type='regression' of the model's config"),
    ],
)
def test_heads_of_one_number_are_no_classifiers(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    model = {"config": {**CONFIG, **config, "pad_token_id": 0}, "labels": [], "task": "sequence_classification"}
    job = class_job("gpt2", "sequence_classification", tmp_path, model=model)
    with pytest.raises(ConfigError, match=said):
        build_model(job)


def test_a_class_tells_how_a_model_of_ones_own_takes_labels() -> None:
    job = Job.model_validate({"model": {"factory": "a:b"}})
    small = {name: value for name, value in CONFIG.items() if name != "model_type"}
    causal = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**small))
    decoder = T5ForConditionalGeneration(CONFIG_MAPPING["t5"](d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    assert _labels_next_tokens(causal, job) and not _labels_next_tokens(decoder, job)
    assert not _labels_next_tokens(torch.nn.Linear(2, 2), job)
