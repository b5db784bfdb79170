"""Rows of images with a class: a folder for each class, or rows with the columns `image` and `label`.

An image is read when its row is, in RGB, and becomes `pixel_values` by the model's image processor. What else that
makes, as the mask of its patches, is read with it where the model takes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.data.corpus import IMAGE_SUFFIXES, data_format, named_files
from shardwise.data.file_rows import FileDataset, FileRow, read_rows
from shardwise.data.processors import IMAGES, open_processor
from shardwise.errors import ConfigError, DataError
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.model.build import load_config
from shardwise.words import nearest


@dataclass(frozen=True)
class ClassifiedImages:
    """Rows of images, each with a class: a map-style data set of `pixel_values`, what comes with them and `labels`.

    Attributes:
        rows: with `image` and `label`.
        classes: names of the classes, by number.
        processor: makes tensors of images.
        arguments: names of those that the model takes.
    """

    rows: Sequence[FileRow]
    classes: Sequence[str]
    processor: Any
    arguments: Collection[str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        image = read_image(row.file(row.columns["image"], "image"), row.where)
        made = self.processor(image, return_tensors="pt")
        tensors = {name: made[name][0] for name in made if name in self.arguments}
        return tensors | {"labels": torch.tensor(class_of(row, self.classes))}


def open_images(job: Job, model_vocabulary: int | None) -> tuple[list[FileRow], FileDataset]:
    """Return the rows of a job of image classification, and what makes its data set of some of them.

    Raises:
        DataError: a label is none of the classes, or an image is missing.
    """
    config = load_config(job)
    labels: Any = config.id2label
    arguments = TASKS[job.model.task].arguments(config) or {"pixel_values"}
    classes = [str(labels[number]) for number in sorted(labels)]
    is_folder = data_format(job.data) == "image_folder"
    rows = _rows_of_folders(job) if is_folder else read_rows(job, ("image", "label"))
    for row in rows:
        class_of(row, classes)
        row.file(row.columns["image"], "image")
    processor = open_processor(job, IMAGES)
    return rows, FileDataset(lambda some: ClassifiedImages(some, classes, processor, arguments))


def _rows_of_folders(job: Job) -> list[FileRow]:
    """Return a row for each image of a directory with a folder for each class, by their paths.

    Raises:
        ConfigError: the path is no directory, or rows are to be filtered.
        DataError: an image is in no folder.
    """
    root = Path(str(job.data.path)).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"data.path={job.data.path!r} with data.format=image_folder is no directory; give the one that holds a "
            "folder for each class"
        )
    if job.data.filter is not None:
        raise ConfigError(
            f"data.filter={job.data.filter!r} with data.format=image_folder: an image in a folder has no columns; "
            "leave data.filter out, or give rows with image and label"
        )
    files = [path for path in named_files(job.data) if path.suffix.lower() in IMAGE_SUFFIXES]
    loose = next((path for path in files if path.parent == root), None)
    if loose is not None:
        raise DataError(f"{loose} lies in no folder of a class; move it into one, or give rows with image and label")
    names = [path.relative_to(root).as_posix() for path in files[: job.data.max_documents]]
    return [FileRow(str(root / name), root, {"image": name, "label": name.partition("/")[0]}) for name in names]


def class_of(row: FileRow, classes: Sequence[str]) -> int:
    """Return the number of a row's class, which it has as a number or as a name.

    Raises:
        DataError: it is neither.
    """
    label = row.columns["label"]
    if isinstance(label, str) and label in classes:
        return list(classes).index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(classes):
        return label
    hint = nearest(label, classes) if isinstance(label, str) else f" Numbers are 0 to {len(classes) - 1}."
    raise DataError(
        f"{row.where}: label={label!r} is none of the {len(classes)} classes of the model; name it in model.labels, or "
        f"mend the row.{hint}"
    )


def read_image(path: Path, where: str) -> Any:
    """Return an image of Pillow's in RGB, turned as its EXIF says.

    Raises:
        DataError: Pillow is missing, or cannot read the file.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError(
            f"{where}: images are read by Pillow, which is not installed; run `pip install 'shardwise[images]'`"
        ) from error
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would cut values at 255: such an image is white
                raise DataError(
                    f"{where}: {path} has values of more than 8 bits (Pillow's mode {image.mode}), and nobody says "
                    "which of them is white; write it again in 8 bits, or remove the row"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: {path} cannot be read as an image: {error}; mend it, or remove the row") from error
