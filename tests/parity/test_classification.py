"""Heads of classes: gradients, weights, accuracy and F1 are those of plain transformers and torch in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from shardwise.checkpoint.export import export_checkpoint
from shardwise.data.order import order
from shardwise.errors import ConfigError, ModelError
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.testing.world import WorldError, WorldPool
from shardwise.training.objectives.classification import accuracy_and_f1
from shardwise.training.session import Session
from shardwise.training.setup import study
from tests.parity.jobs import check_agrees

LENGTH, CLASSES, PAD = 12, 3, 0
STEPS, ROWS = 3, 8
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 4": (4, {}),
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_inner": 13, "n_positions": LENGTH},
    "llama": {
        "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 13, "max_position_embeddings": LENGTH,
    },
    "bert": {
        "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 13,
        "max_position_embeddings": LENGTH,
    },
}  # fmt: skip
DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout"),
    "llama": ("classifier_dropout",),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
AUTO = {
    "sequence_classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
}


class Labelled:
    """Rows of token ids with padding behind them, and their classes: of each row, or of some of its tokens."""

    def __init__(self, of_tokens: bool, size: int = 48) -> None:
        draw = torch.Generator().manual_seed(5)
        self.ids = torch.randint(1, 40, (size, LENGTH), generator=draw)
        lengths = torch.randint(3, LENGTH + 1, (size, 1), generator=draw)
        is_token = torch.arange(LENGTH) < lengths
        self.ids[~is_token] = PAD
        self.mask = is_token.long()
        classes = self.ids % CLASSES
        self.labels = classes.masked_fill(~is_token | (self.ids % 5 == 0), -100) if of_tokens else classes[:, 0]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": self.labels[index]}


class Unpadded(Labelled):
    """The same without the padding."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = int(self.mask[index].sum())
        return {name: value[:length] if value.dim() else value for name, value in super().__getitem__(index).items()}


def class_job(family: str, task: str, tmp_path: Path, padding: int | None = PAD, **sections: Any) -> Job:
    """A tiny job of classes; its config is a file, since Llama's has no field for the dropout of a head of classes."""
    config = {"model_type": family, "vocab_size": 40, "pad_token_id": padding, **CONFIGS[family]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | dict.fromkeys(DROPOUT[family], 0.0)))
    base: dict[str, Any] = {
        "model": {"config": str(file), "task": task, "labels": ["zero", "one", "two"], "attention": "eager"},
        "parallel": {"device": "cpu"}, "precision": {"compute": "fp64"},
        "training": {"steps": STEPS, "sequences_per_step": ROWS},
        "optimizer": {"schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-2},
        "data": {
            "factory": f"{__name__}:Labelled", "factory_arguments": {"of_tokens": task == "token_classification"},
            "sequence_length": LENGTH, "validation_fraction": 0.25, "cache_directory": str(tmp_path / "cache"),
        },
    }  # fmt: skip
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Job.model_validate(base)


def trained(job: Job) -> tuple[dict[str, Tensor], list[tuple[float, float]], dict[str, Tensor], dict[str, Any]]:
    """Train; return the weights before, (loss, norm) of each step, the weights behind, and the evaluation."""
    with Session(job, device=torch.device("cpu")) as session:
        before = {name: tensor.clone() for name, tensor in session.model.whole_tensors()}
        results = [session.step(batches) for batches in session.batches()]
        session.evaluate()
        after = {name: tensor.clone() for name, tensor in session.model.whole_tensors()}
        return before, [(result.loss, result.grad_norm) for result in results], after, session.evaluated


def plain(job: Job, weights: dict[str, Tensor]) -> torch.nn.Module:
    values = json.loads(Path(str(job.model.config)).read_text())
    config = CONFIG_MAPPING[values.pop("model_type")](**values, num_labels=CLASSES)
    model = AUTO[job.model.task].from_config(config, attn_implementation="eager").double()
    model.load_state_dict(weights, strict=False)
    return model


def order_of(job: Job, step: int) -> list[int]:
    return [order(job.training.seed, step * ROWS + row, 36) for row in range(ROWS)]


def stepped(model: torch.nn.Module, job: Job) -> list[tuple[float, float]]:
    """Train the plain model by hand on the same rows."""
    data = Labelled(job.model.task == "token_classification")
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    results = []
    for step in range(STEPS):
        rows = order_of(job, step)
        logits = model(input_ids=data.ids[rows], attention_mask=data.mask[rows]).logits
        loss = F.cross_entropy(logits.reshape(-1, CLASSES), data.labels[rows].reshape(-1), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results.append((float(loss.detach()), float(norm)))
    return results


def check(world_pool: WorldPool, tmp_path: Path, family: str, task: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    job = class_job(family, task, tmp_path, parallel=parallel)
    before, steps, after, record = world_pool.run(ranks, trained, job)[0]
    model = plain(job, before)
    assert steps == [pytest.approx(numbers, rel=1e-9) for numbers in stepped(model.train(), job)]
    own = dict(model.named_parameters())
    for name, tensor in after.items():
        assert torch.allclose(tensor, own[name], rtol=1e-9, atol=1e-12), name
    data = Labelled(task == "token_classification")
    with torch.no_grad():
        logits = model.eval()(input_ids=data.ids[36:], attention_mask=data.mask[36:]).logits
    labels, predicted = data.labels[36:].flatten(), logits.argmax(-1).flatten()
    is_counted = labels != -100
    labels, predicted = labels[is_counted], predicted[is_counted]
    assert record["validation_accuracy"] == pytest.approx(float((labels == predicted).double().mean()), abs=1e-12)
    scores = []
    for number in set(labels.tolist()) | set(predicted.tolist()):
        hits = int(((labels == number) & (predicted == number)).sum())
        scores.append(2 * hits / int((labels == number).sum() + (predicted == number).sum()))
    assert record["validation_f1"] == pytest.approx(sum(scores) / len(scores), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("task", AUTO)
def test_classes_on_every_layout(world_pool: WorldPool, tmp_path: Path, task: str, family: str, layout: str) -> None:
    check(world_pool, tmp_path, family, task, layout)


UNPADDED = {"training": {"microbatch_size": 1}, "data": {"factory": f"{__name__}:Unpadded"}}


def test_rows_of_lengths_of_their_own_agree_with_one_process(world_pool: WorldPool, tmp_path: Path) -> None:
    check_agrees(world_pool, 2, class_job("bert", "token_classification", tmp_path, **UNPADDED))


def test_on_stages_all_ranks_are_told_that_rows_differ_in_length(world_pool: WorldPool, tmp_path: Path) -> None:
    job = class_job("bert", "token_classification", tmp_path, **UNPADDED, parallel={"pipeline_parallel_degree": 2})
    with pytest.raises(WorldError) as caught:
        world_pool.run(2, trained, job)
    for report in caught.value.reports.values():
        assert "input_ids of several shapes" in report.text and "use pipeline_parallel_degree 1" in report.text


def test_accuracy_and_f1() -> None:
    right, labelled, predicted = [3.0, 2.0, 0.0], [4.0, 4.0, 0.0], [5.0, 3.0, 0.0]
    metrics = accuracy_and_f1(torch.tensor([right, labelled, predicted]))
    assert metrics["accuracy"] == 5 / 8
    assert metrics["f1"] == pytest.approx((6 / 9 + 4 / 7) / 2)


def test_a_decoder_needs_to_know_its_padding(tmp_path: Path) -> None:
    job = class_job("gpt2", "sequence_classification", tmp_path, padding=None)
    with pytest.raises(ModelError, match="has no pad_token_id, by which the last token of a sample is found"):
        build_model(job)


@pytest.mark.slow
def test_a_head_is_put_on_a_language_model(world_pool: WorldPool, tmp_path: Path) -> None:
    class_job("llama", "sequence_classification", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    base = AutoModelForCausalLM.from_config(CONFIG_MAPPING[values.pop("model_type")](**values))
    base.save_pretrained(tmp_path / "base")
    job = class_job(
        "llama", "sequence_classification", tmp_path, model={"path": str(tmp_path / "base"), "config": None}
    )
    before = world_pool.run(2, trained, job)[0][0]
    stored = base.state_dict()
    assert all(torch.equal(tensor, stored[name].double()) for name, tensor in before.items() if name != "score.weight")
    assert before["score.weight"].std() > 0


def trained_and_saved(job: Job) -> dict[str, Tensor]:
    with Session(job, device=torch.device("cpu")) as session:
        for batches in session.batches():
            session.step(batches)
        session.save(wait=True)
        return {name: tensor.clone() for name, tensor in session.model.whole_tensors()}


def test_adapters_train_and_keep_a_head_that_is_drawn(world_pool: WorldPool, tmp_path: Path) -> None:
    class_job("llama", "sequence_classification", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[values.pop("model_type")](**values)).save_pretrained(
        tmp_path / "base"
    )
    sections: dict[str, Any] = {
        "model": {"path": str(tmp_path / "base"), "config": None},
        "checkpoint": {"directory": str(tmp_path / "kept")}, "adapter": {"kind": "lora"},
    }  # fmt: skip
    job = class_job("llama", "sequence_classification", tmp_path, **sections)
    with pytest.raises(ConfigError, match=r"score\.weight is drawn anew.*set it to \['score'\]"):
        study(job)
    sections["adapter"] = {"kind": "lora", "modules_to_save": ["score"]}
    job = class_job("llama", "sequence_classification", tmp_path, **sections)
    weights = world_pool.run(1, trained_and_saved, job)[0]
    exported = export_checkpoint(str(next((tmp_path / "kept").glob("step-*"))), tmp_path / "whole", merge=True)
    score = load_file(exported / "model.safetensors")["score.weight"]
    assert torch.equal(score.double(), weights["score.weight"].to(score.dtype).double())
    sections["model"]["dtype"] = "file"
    assert (
        "score.weight" not in study(class_job("llama", "sequence_classification", tmp_path, **sections)).weight_dtypes
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("task", AUTO)
def test_verify_proves_it(world_pool: WorldPool, tmp_path: Path, task: str) -> None:
    check_agrees(world_pool, 2, class_job("bert", task, tmp_path))
