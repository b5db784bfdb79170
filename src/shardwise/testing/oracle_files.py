"""The oracle's own reader of rows that name files, from the definitions in `data/file_rows.py`, not with its code.

It reads JSON lines and folders of classes; images with Pillow, waves of 16 bits, and what transformers' processors
make of them, called as they are documented.
"""

from __future__ import annotations

import json
import tempfile
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer

from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.model.build import load_config
from shardwise.testing.oracle_data import EVALUATION, NOT_COUNTED, Rows, mixed, shuffled_index

Sample = dict[str, Tensor]


class FileSource:
    """Samples of a task that reads files; their tensors have rows in dim 0."""

    def __init__(self, job: Job) -> None:
        self.seed, self.root = job.training.seed, Path(str(job.data.path))
        rows = _folders(self.root) if self.root.is_dir() else _lines(self.root)
        rows = rows[: job.data.max_documents]
        self.validation_size = max(1, int(len(rows) * job.data.validation_fraction))
        texts = [json.dumps(row, sort_keys=True).encode() for row in rows]
        draws = [mixed(mixed(self.seed) ^ xxhash.xxh3_64_intdigest(text)) for text in texts]
        ranked = [rows[number] for number in sorted(range(len(rows)), key=lambda number: (draws[number], number))]
        self.held_out, self.training = ranked[: self.validation_size], ranked[self.validation_size :]
        self.read = READERS[job.model.task](job, self.root if self.root.is_dir() else self.root.parent)

    def rows(self, counters: Sequence[int]) -> Rows:
        """Return the samples of some counters."""
        samples = [self.read(self._row(counter)) for counter in counters]
        inputs = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
        return Rows(inputs, inputs.pop("labels"), list(counters))

    def _row(self, counter: int) -> dict[str, Any]:
        if counter >= EVALUATION:
            return self.held_out[counter - EVALUATION]
        return self.training[shuffled_index(self.seed, counter, len(self.training))]


class ImageReader:
    """Reads an image and the number of its class."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.process, self.folder = _opened(AutoImageProcessor, job, backend="pil"), folder
        config = load_config(job)
        self.names: Any = config.id2label
        self.taken = TASKS[job.model.task].arguments(config) or {"pixel_values"}

    def __call__(self, row: dict[str, Any]) -> Sample:
        label = row["label"]
        number = label if isinstance(label, int) else next(n for n, name in self.names.items() if name == label)
        made = self.process(images=[_image(self.folder / row["image"])], return_tensors="pt")
        return {**{name: made[name] for name in self.taken & made.keys()}, "labels": torch.tensor([number])}


class SpeechReader:
    """Reads a wave, and the tokens of its text."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.extract, self.folder, self.job = _opened(AutoFeatureExtractor, job), folder, job
        self.tokenizer = AutoTokenizer.from_pretrained(str(job.data.tokenizer or job.model.path))
        self.start = load_config(job).decoder_start_token_id

    def __call__(self, row: dict[str, Any]) -> Sample:
        with wave.open(str(self.folder / row["audio"])) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / np.float32(32768)
        features = self.extract(samples, sampling_rate=self.extract.sampling_rate, return_tensors="pt")
        ids = self.tokenizer(row[self.job.data.field])["input_ids"]
        ids = ids[ids[0] == self.start :]
        labels = [*ids, *[NOT_COUNTED] * self.job.data.sequence_length][: self.job.data.sequence_length]
        return {**features, "labels": torch.tensor([labels])}


class ChatReader:
    """Reads messages whose parts of type image name their files; answers are found by tokens of beginnings."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.processor, self.folder, self.job = _opened(AutoProcessor, job), folder, job
        self.processor.image_processor = _opened(AutoImageProcessor, job, backend="pil")

    def __call__(self, row: dict[str, Any]) -> Sample:
        messages = [{**message, "content": [self._part(p) for p in message["content"]]} for message in row["messages"]]
        made, length = self._made(messages), self.job.data.sequence_length
        ids = made["input_ids"][0]
        labels = torch.full((1, length), NOT_COUNTED)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                first = len(self._made(messages[:number], add_generation_prompt=True)["input_ids"][0])
                last = len(self._made(messages[: number + 1])["input_ids"][0])
                labels[0, first - 1 : last - 1] = ids[first:last]
        room, fill = length - len(ids), self.processor.tokenizer.pad_token_id or 0
        for name, values in made.items():
            if values.shape == (1, len(ids)):
                made[name] = torch.nn.functional.pad(values, (0, room), value=fill if name == "input_ids" else 0)
        return {**made, "labels": labels}

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image", "image": _image(self.folder / part["image"])} if part["type"] == "image" else part

    def _made(self, messages: list[dict[str, Any]], **settings: Any) -> dict[str, Tensor]:
        made: dict[str, Tensor] = dict(
            self.processor.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_tensors="pt",
                processor_kwargs={"add_special_tokens": False}, **settings,
            )
        )  # fmt: skip
        return made


READERS: dict[str, Any] = {
    "image_classification": ImageReader,
    "speech_seq2seq": SpeechReader,
    "image_text_to_text": ChatReader,
}


def _opened(auto_class: Any, job: Job, **settings: Any) -> Any:
    given = job.data.processor
    if not isinstance(given, dict):
        return auto_class.from_pretrained(str(given or job.model.path), **settings)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "preprocessor_config.json").write_text(json.dumps(given))
        return auto_class.from_pretrained(directory, **settings)


def _image(path: Path) -> Any:
    from PIL import Image

    return Image.open(path).convert("RGB")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _folders(root: Path) -> list[dict[str, Any]]:
    names = sorted(path.relative_to(root).as_posix() for path in root.glob("*/**/*") if path.is_file())
    return [{"image": name, "label": name.split("/")[0]} for name in names]
