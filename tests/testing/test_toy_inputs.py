"""Toys that see: each model type's image, as its forward takes it, in rows that tell places and sizes apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from shardwise.data.factory import Samples
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.model.build import load_config
from shardwise.testing.oracle_data import FactorySource
from shardwise.testing.toy_configs import language_model_types
from shardwise.testing.toy_inputs import toy_of_files
from shardwise.testing.toy_samples import IMAGE_TOKEN, ToySamples, inputs_of_files

TASK, FACTORY = "image_text_to_text", "shardwise.testing.toy_samples:ToySamples"
LARGEST = 600_000  # parameters; most toys have 40,000 to 100,000
SHARE = 0.85  # of types whose toys train; the others need packages, are called in ways of their own, or cannot train
# Each takes its image in another way: a picture, patches of several images joined, what a decoder reads, tiles of which
# some are none, patches that begin with their place.
WAYS = ("llava", "kimi_k25", "florence2", "granite_docling", "pix2struct")  # the fourth is not in transformers 5.17


def toy_job(model_type: str) -> Job:
    config, arguments = toy_of_files(TASK, model_type)
    data = {"factory": FACTORY, "factory_arguments": arguments}
    return Job.model_validate({"model": {"config": config, "task": TASK}, "data": data})


def trained(job: Job) -> torch.nn.Module:
    """A toy with the gradients of a row's logits."""
    model = TASKS[TASK].model_class().from_config(load_config(job), dtype=torch.float32)
    model(**inputs_of_files(job)).logits.square().sum().backward()
    assert sum(parameter.numel() for parameter in model.parameters()) < LARGEST
    return model


@pytest.mark.parametrize("model_type", [way for way in WAYS if way in CONFIG_MAPPING])
def test_a_toy_trains_on_what_it_sees(model_type: str) -> None:
    job = toy_job(model_type)
    model, rows = trained(job), ToySamples(**job.data.factory_arguments)
    seen = [name for name, value in model.named_parameters() if value.grad is not None and value.grad.any()]
    assert any("vision" in name or name.startswith("encoder.") for name in seen), seen
    inputs, labels = {**rows[0]}, rows[0]["labels"]
    image = next(name for name in ("pixel_values", "flattened_patches") if name in inputs)
    assert not torch.equal(inputs[image], rows[1][image])
    assert (labels != IMAGE_TOKEN).all() and (labels != -100).any()


def places(row: Mapping[str, Tensor]) -> list[int]:
    return (row["input_ids"] == IMAGE_TOKEN).nonzero().flatten().tolist()


def test_rows_have_their_images_in_several_places_and_sizes() -> None:
    arguments: dict[str, Any] = {
        "task": TASK, "reads": ["input_ids", "mm_token_type_ids"], "joined": True,
        "inputs": [
            {"shapes": {"patches": [number, 3]}, "numbers": {"sizes": [[1, number]]}, "tokens": number}
            for number in (4, 2)
        ],
    }  # fmt: skip
    rows = ToySamples(**arguments)
    assert [len(places(row)) for row in rows.rows[:4]] == [4, 2, 4, 2]
    assert len({places(row)[0] for row in rows.rows}) > 2
    assert {len(row["input_ids"]) for row in rows.rows} == {len(rows[0]["labels"])}
    for row in rows.rows:
        assert row["mm_token_type_ids"].nonzero().flatten().tolist() == places(row)
        counted = row["labels"] != -100
        assert torch.equal(row["labels"][counted], row["input_ids"][counted])


def test_the_oracle_joins_the_images_of_rows() -> None:
    arguments = {"task": TASK, "inputs": [{"shapes": {"patches": [n, 3]}} for n in (4, 2)], "joined": True}
    config = {"model_type": "llama"}
    data = {"factory": FACTORY, "factory_arguments": {**arguments, "reads": ["input_ids"]}}
    source = FactorySource(Job.model_validate({"model": {"config": config, "task": TASK}, "data": data}))
    rows = source.rows([0, 1, 2])
    samples = Samples(source.samples, 0, source.size, "toys", source.samples.stacked)
    ours = samples.batch([source._place(counter) for counter in range(3)], [0, 1, 2], 0).arguments()
    assert {name: value.tolist() for name, value in ours.items()} == {
        name: value.tolist() for name, value in rows.inputs.items()
    }


@pytest.mark.slow
def test_most_types_of_images_and_text_have_a_toy_that_trains() -> None:
    types, failures = language_model_types(TASK), dict[str, str]()
    for model_type in types:
        try:
            trained(toy_job(model_type))
        except Exception as error:  # any code may run in a model's forward
            failures[model_type] = f"{type(error).__name__}: {error}"
    assert len(failures) <= (1 - SHARE) * len(types), failures
