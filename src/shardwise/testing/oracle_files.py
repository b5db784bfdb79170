"""The oracle's own reader of rows that name files, from the definitions in `data/file_rows.py`, not with its code.

It reads JSON lines and folders of classes; images with Pillow and transformers' processors, called as they are
documented.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers import AutoImageProcessor

from shardwise.job.schema import Job
from shardwise.model.build import load_config
from shardwise.testing.oracle_data import EVALUATION, Rows, mixed, shuffled_index


class FileSource:
    """Samples of a task that reads files."""

    def __init__(self, job: Job) -> None:
        self.job, self.seed, self.root = job, job.training.seed, Path(str(job.data.path))
        rows = _folders(self.root) if self.root.is_dir() else _lines(self.root)
        rows = rows[: job.data.max_documents]
        self.validation_size = max(1, int(len(rows) * job.data.validation_fraction))
        texts = [json.dumps(row, sort_keys=True).encode() for row in rows]
        draws = [mixed(mixed(self.seed) ^ xxhash.xxh3_64_intdigest(text)) for text in texts]
        ranked = [rows[number] for number in sorted(range(len(rows)), key=lambda number: (draws[number], number))]
        self.held_out, self.training = ranked[: self.validation_size], ranked[self.validation_size :]
        directory = str(job.data.processor or job.model.path)
        self.read = {"image_classification": ImageReader}[job.model.task](job, directory)

    def rows(self, counters: Sequence[int]) -> Rows:
        """Return the samples of some counters."""
        folder = self.root if self.root.is_dir() else self.root.parent
        samples = [self.read(folder, self._row(counter)) for counter in counters]
        inputs = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return Rows(inputs, inputs.pop("labels"), list(counters))

    def _row(self, counter: int) -> dict[str, Any]:
        if counter >= EVALUATION:
            return self.held_out[counter - EVALUATION]
        return self.training[shuffled_index(self.seed, counter, len(self.training))]


class ImageReader:
    """Reads an image and the number of its class."""

    def __init__(self, job: Job, directory: str) -> None:
        self.process = AutoImageProcessor.from_pretrained(directory, backend="pil")
        self.names = load_config(job).id2label

    def __call__(self, folder: Path, row: dict[str, Any]) -> dict[str, Tensor]:
        from PIL import Image

        label = row["label"]
        number = label if isinstance(label, int) else next(n for n, name in self.names.items() if name == label)
        pixels = self.process(images=[Image.open(folder / row["image"]).convert("RGB")], return_tensors="pt")
        return {"pixel_values": pixels["pixel_values"][0], "labels": torch.tensor(number)}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _folders(root: Path) -> list[dict[str, Any]]:
    names = sorted(path.relative_to(root).as_posix() for path in root.glob("*/**/*") if path.is_file())
    return [{"image": name, "label": name.split("/")[0]} for name in names]
