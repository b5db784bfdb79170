"""Samples of tensors for toys of models that see images or hear sound.

Values are random. A row of a model of text and images has one image, with the image tokens in other places than in the
row before. Where the model reads sizes of images, rows have other ones.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from shardwise.data.factory import Samples
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.testing.toy_configs import VOCABULARY

IMAGE_TOKEN, FIRST_TOKEN, CLASSES = 3, 10, 3
LENGTH, PLACES = 32, 4  # of a row's text; where an image may stand in it
# Arguments of models that say which tokens are those of images.
MARKS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask")
OF_TOKENS = frozenset(("input_ids", "decoder_input_ids", "attention_mask", "labels", *MARKS))


class ToySamples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of random tensors with labels.

    Args:
        task: as in `model.task`.
        inputs: what rows have, in turn: the `shapes` of tensors of floats by name, `numbers` that the model takes by
            name, how many `tokens` an image has, and how many positions it has `ahead` of the text instead.
        reads: the arguments of tokens and of marks of image tokens that the model takes.
        joined: whether the tensors of images stand one behind the other in a batch.
        rows: how many.

    Attributes:
        stacked: the tensors that become a dim more in a batch, where others are joined.
    """

    def __init__(
        self,
        task: str,
        inputs: list[dict[str, Any]],
        reads: Collection[str] = (),
        joined: bool = False,
        rows: int = 40,
    ) -> None:
        draw = torch.Generator().manual_seed(1)
        self.stacked = OF_TOKENS if joined else None
        self.rows = []
        length = LENGTH + 1 + max(row.get("tokens", 0) for row in inputs)
        for number in range(rows):
            row = inputs[number % len(inputs)]
            tensors = {name: torch.randn(*shape, generator=draw) for name, shape in row["shapes"].items()}
            tensors |= {name: torch.tensor(numbers) for name, numbers in row.get("numbers", {}).items()}
            if (kind := TASKS[task].labels) == "classes":
                tensors["labels"] = torch.randint(CLASSES, (), generator=draw)
            elif kind == "next":
                text = torch.randint(FIRST_TOKEN, VOCABULARY, (length,), generator=draw)
                ids = _with_image(text, 1 + number % PLACES, row.get("tokens", 0))
                tensors |= _tokens(ids, text if "decoder_input_ids" in reads else ids, reads, row.get("ahead", 0))
            else:
                tensors["labels"] = torch.randint(FIRST_TOKEN, VOCABULARY, (LENGTH,), generator=draw)
            self.rows.append(tensors)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def _with_image(row: Tensor, place: int, tokens: int) -> Tensor:
    """Return `row` with so many image tokens at `place`, and the token in front of them once more behind."""
    return torch.cat([row[:place], torch.full((tokens,), IMAGE_TOKEN), row[place - 1 :]])[: len(row)]


def _tokens(ids: Tensor, decoded: Tensor, reads: Collection[str], ahead: int) -> dict[str, Tensor]:
    """Return the tensors of a row that a model reads, and its labels: its tokens, but the first and those of images."""
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": decoded}
    tensors |= {name: (ids == IMAGE_TOKEN).long() for name in MARKS}
    labels = torch.cat([torch.full((ahead + 1,), -100), decoded[1:]])
    return {name: tensors[name] for name in reads} | {"labels": labels.masked_fill(labels == IMAGE_TOKEN, -100)}


def inputs_of_files(job: Job) -> dict[str, Tensor]:
    """Return the arguments of a forward of a row of a toy's samples."""
    dataset = ToySamples(**job.data.factory_arguments)
    batch = Samples(dataset, 0, len(dataset), "toys", dataset.stacked).batch([0], [0], 0)
    inputs = batch.arguments()
    if TASKS[job.model.task].labels == "decoder":
        assert batch.labels is not None
        inputs["decoder_input_ids"] = batch.labels
    return inputs
