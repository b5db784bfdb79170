"""Conversations with images on every layout against one process, and rows of them that are refused by name."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor

from shardwise.data.batch import Batch, batch_digest
from shardwise.data.factory import Samples
from shardwise.data.prepare import prepare
from shardwise.errors import ConfigError, DataError, LegalityError
from shardwise.job.schema import Job
from shardwise.plan.plan import World, resolve
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study
from tests.parity.chat_files import CONFIGS, PATCH, PROCESSORS, SIZE, write_chats
from tests.parity.jobs import check_agrees

NEEDS = "transformers' processor of videos, a part of this one, needs torchvision"
LENGTH = 64
pytestmark = pytest.mark.skipif(  # it is a stand-in there
    hasattr(AutoImageProcessor, "_backends"), reason="image processors of transformers 5.17 need torchvision"
)
PATCHES = {"qwen2_vl": (3 * 2 * PATCH**2,)}  # features of a patch, two of time, where images are given as patches
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.skipif(name in PATCHES and find_spec("torchvision") is None, reason=NEEDS)])
    for name in PROCESSORS
]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "shard 2": (2, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "tensor 2, shard 2": (4, {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "pipeline 2, tensor 2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
}


def chat_job(tmp_path: Path, family: str = "llava", **sections: Any) -> Job:
    """Return a job of conversations with images, on the rows in a directory."""
    config = toy_config(family)
    for name, values in CONFIGS[family].items():
        config[name] = {**config[name], **values} if isinstance(values, dict) else values
    PROCESSORS[family]().save_pretrained(tmp_path / "processor")
    base: dict[str, Any] = {
        "model": {"config": config, "task": "image_text_to_text", "attention": "eager"},
        "data": {
            "path": str(tmp_path / "rows.jsonl"), "format": "chat", "processor": str(tmp_path / "processor"),
            "sequence_length": LENGTH, "packing": False,
        },
        "training": {"steps": 2, "sequences_per_step": 4, "microbatch_size": 1},
        "precision": {"compute": "fp64"}, "parallel": {"device": "cpu"},
    }  # fmt: skip
    return Job.model_validate({**base, **{name: base.get(name, {}) | keys for name, keys in sections.items()}})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_agrees(world_pool: WorldPool, tmp_path: Path, layout: str, family: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    write_chats(tmp_path)
    check_agrees(world_pool, ranks, chat_job(tmp_path, family, parallel=parallel))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [{"activation_checkpointing": "full"}, {}])
@pytest.mark.parametrize("layout", ["shard 2", "pipeline 2"])
def test_a_tower_is_frozen(world_pool: WorldPool, tmp_path: Path, layout: str, memory: dict[str, Any]) -> None:
    write_chats(tmp_path)
    job = chat_job(tmp_path, memory=memory, parallel=LAYOUTS[layout][1])
    frozen = job.model.model_copy(update={"freeze": ["model.vision_tower"]})
    job = job.model_copy(update={"model": frozen, "training": job.training.model_copy(update={"microbatch_size": 2})})
    assert all(name.startswith("model.vision_tower") for name in study(job).frozen)
    check_agrees(world_pool, 2, job)


def job_that_drops_scores(tmp_path: Path, layout: str = "tensor 2") -> Job:
    """Return a job whose tower drops scores of attention."""
    write_chats(tmp_path)
    config: Any = chat_job(tmp_path).model.config
    vision = {**config["vision_config"], "attention_dropout": 0.2}
    return chat_job(tmp_path, model={"config": {**config, "vision_config": vision}}, parallel=LAYOUTS[layout][1])


def test_heads_stay_whole_where_a_tower_drops_scores(tmp_path: Path) -> None:
    assert "elsewhere dropout has all heads" in study(job_that_drops_scores(tmp_path)).heads_whole
    assert not study(chat_job(tmp_path, parallel=LAYOUTS["tensor 2"][1])).heads_whole


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor 2", "pipeline 2"])
def test_a_tower_drops_the_same_scores(world_pool: WorldPool, tmp_path: Path, layout: str) -> None:
    check_agrees(world_pool, 2, job_that_drops_scores(tmp_path, layout))


@pytest.mark.slow
def test_adapters_of_a_tower_and_its_language_model_on_stages(world_pool: WorldPool, tmp_path: Path) -> None:
    write_chats(tmp_path)
    adapter = {"kind": "lora", "rank": 2, "target_modules": ["q_proj", "v_proj"]}
    check_agrees(world_pool, 2, chat_job(tmp_path, adapter=adapter, parallel=LAYOUTS["pipeline 2"][1]))


def test_context_ranks_are_refused(tmp_path: Path) -> None:
    write_chats(tmp_path)
    job = chat_job(tmp_path, parallel={"context_parallel_degree": 2})
    with pytest.raises(LegalityError, match="context_parallel_degree=2"):
        resolve(job, World(2, "cpu", 2), study(job))


def test_a_tower_stands_on_the_first_stage(tmp_path: Path) -> None:
    write_chats(tmp_path)
    job = chat_job(tmp_path, "gemma3", parallel={"pipeline_parallel_degree": 2})
    facts = study(job)
    first, second = resolve(job, World(2, "cpu", 2), facts).stages
    assert facts.stages.towers == ("model.vision_tower", "model.multi_modal_projector")
    assert [name for name in first if "vision" in name] and not [name for name in second if "vision" in name]
    partition = {name: number for number, names in enumerate((first[:1], (*first[1:], *second))) for name in names}
    given = {"pipeline_parallel_degree": 2, "auto_partition": False, "partition": partition}
    with pytest.raises(LegalityError, match=r"vision_tower, .*projector must be on the first stage.* \[0, 1, 1\]"):
        resolve(chat_job(tmp_path, "gemma3", parallel=given), World(2, "cpu", 2), facts)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_trained_on_and_images_are_joined(tmp_path: Path, family: str) -> None:
    write_chats(tmp_path)
    data, tokenizer = prepare(chat_job(tmp_path, family)), PROCESSORS[family]().tokenizer
    assert isinstance(data.train, Samples)
    batch = data.train.batch([0, 1, 2, 3], [0, 1, 2, 3], 0)
    assert batch.labels is not None
    rows = [json.loads(line)["messages"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    answers = {f"{messages[1]['content'][0]['text']} <end>": len(messages[0]["content"]) - 1 for messages in rows}
    texts = [tokenizer.decode(labels[labels >= 0]) for labels in batch.labels]
    counted = batch.lengths.get("image_grid_thw", batch.lengths["pixel_values"])  # of images, where pixels are patches
    assert [answers[text] for text in texts] == counted
    shape = batch.arguments()["pixel_values"].shape
    assert shape[0] == sum(batch.lengths["pixel_values"])
    assert shape[1:] == PATCHES.get(family, (3, SIZE, SIZE))
    alone = [data.train.batch([index], [index], 0) for index in range(4)]
    assert batch_digest(batch) % 2**64 == sum(map(batch_digest, alone)) % 2**64  # padding is no part of a sample


def chats_file(tmp_path: Path, row: dict[str, Any]) -> Path:
    """Write three rows, of which the last is given."""
    path = write_chats(tmp_path, 2)
    path.write_text(path.read_text() + "\n" + json.dumps(row))
    return tmp_path


def said(*parts: Any, **columns: Any) -> dict[str, Any]:
    """Return a row in which the user says some parts."""
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)
    answer = {"role": "assistant", "content": "a cat"}
    return {"messages": [{"role": "user", "content": content}, answer], **columns}


@pytest.mark.parametrize(
    "row, says",
    [
        (said("what is this"), r"rows.jsonl, line 3: no image"),
        (said("<image> what is this"), r"line 3: 0 images in the row and 1 places"),
        (said("what is this", images=["0-0.png"]), r"line 3: 1 images in the row and 0 places"),
        (said("<image> what", images=["none.png"]), r"line 3: image='none.png' is no file"),
        (said({"type": "video", "video": "a.mp4"}), r"line 3: a part .*'video'.* content has parts of type text"),
        (said(*[{"type": "image", "image": "0-0.png"}] * 5), r"line 3: 86 tokens with those of its images"),
        ({"messages": [{"role": "user", "content": "<image> what"}], "image": "0-0.png"}, r"line 3: no token is train"),
        ({"image": "0-0.png"}, r"line 3: no messages"),
        (
            {"messages": [{"role": "user", "content": {"type": "text", "text": "what"}}], "image": []},
            r"line 3: content \{'type': 'text', .*; give a text, or a list of parts",
        ),
        (said("<image> what", images=["iVBORw0KGgo" * 500]), r"line 3: image='iVBOR.*\.\.\. is no path .File name too"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    job = chat_job(chats_file(tmp_path, row))
    with pytest.raises(DataError, match=says):
        data = prepare(job)
        for split in (data.train, data.validation):
            for number in range(len(split)):
                split.sample(number)


SHAREGPT = [{"from": "human", "value": "<image> what"}, {"from": "gpt", "value": "a cat"}]


@pytest.mark.parametrize(
    "row", [said("<image> what is this", images=["0-0.png"]), {"conversations": SHAREGPT, "image": "0-0.png"}]
)
def test_places_in_texts_are_those_of_the_column(tmp_path: Path, row: dict[str, Any]) -> None:
    data = prepare(chat_job(chats_file(tmp_path, row)))
    samples = [split.sample(number) for split in (data.train, data.validation) for number in range(len(split))]
    assert len(samples) == 3


def test_another_image_token_is_refused(tmp_path: Path) -> None:
    write_chats(tmp_path, 3)
    job = chat_job(tmp_path)
    config = {**job.model.config, "image_token_id": 90}
    with pytest.raises(ConfigError, match=r"rows.jsonl, line \d: the processor puts no token image_token_id=90"):
        prepare(job.model_copy(update={"model": job.model.model_copy(update={"config": config})}))


def test_a_batch_says_which_entries_are_real() -> None:
    values = torch.arange(12.0).reshape(2, 3, 2)
    batch = Batch({"patches": values}, None, torch.arange(2), lengths={"patches": [3, 1]})
    assert torch.equal(batch.arguments()["patches"], torch.cat([values[0], values[1, :1]]))
