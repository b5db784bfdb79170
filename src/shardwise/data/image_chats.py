"""Rows of conversations with images: the columns of `data/conversations.py`, and files of images.

A message's content is a list of parts, `{type: image}` and `{type: text, text: …}`, or a text in which `<image>` stands
for one. A part may name its file, as `image` or `path`; the others take those of the row's column `images`, in order.

A row is rendered by the chat template, its images become tensors by the model's processor, which puts as many image
tokens in their places as the model has features, and what the assistant says is trained on. Sequences are padded, and
hold one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as chained
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.data.chat_template import ChatTemplate, Span, overlapping, read_template
from shardwise.data.conversations import Conversation, chat
from shardwise.data.file_rows import FileDataset, FileRow, read_rows
from shardwise.data.images import read_image
from shardwise.data.processors import CHAT, open_processor
from shardwise.data.readers import short
from shardwise.data.tokenizer import TokenizerSource, check_vocabulary
from shardwise.errors import ConfigError, DataError
from shardwise.job.schema import Job
from shardwise.job.tasks import IGNORED
from shardwise.model.build import load_config

PLACE = "<image>"  # of an image in a text
COLUMNS = ("messages", "conversations", "images", "image", "tools", "system")
OF_TOKENS = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"))  # a value a token
Part = dict[str, Any]


class ImageConversation(NamedTuple):
    """A conversation whose contents are lists of parts, and the files of its images in their order."""

    conversation: Conversation
    files: list[Path]


@dataclass(frozen=True)
class ImageChats:
    """Rows of conversations with images: a map-style data set of the processor's tensors and aligned `labels`.

    Attributes:
        rows: with the columns of a conversation.
        processor: makes tensors of texts and images.
        template: renders conversations.
        length: of a sequence.
        image_token: that stands for features of images in the model, as far as its config says it.
    """

    rows: Sequence[FileRow]
    processor: Any
    template: ChatTemplate
    length: int
    image_token: int | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        conversation, files = image_conversation(row)
        rendered = self.template.rendered(conversation)
        images = [read_image(path, row.where) for path in files]
        made = self.processor(
            text=[rendered.text], images=[images], add_special_tokens=False, return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )  # fmt: skip
        offsets, [places] = made.pop("offset_mapping")[0], made.pop("text_replacement_offsets")
        if len(places) != len(files):
            raise DataError(
                f"{row.where}: {len(files)} images, and the chat template has {len(places)} places for them; mend "
                "the row or the template"
            )
        ids = np.asarray(made["input_ids"][0], dtype=np.int64)
        trained = overlapping(offsets, [_moved(span, places) for span in rendered.spans])
        self._check(row, ids, trained)
        sample = {name: self._tensor(name, values) for name, values in made.items()}
        return {**sample, "labels": self._labels(ids, trained)}

    def _check(self, row: FileRow, ids: np.ndarray, trained: np.ndarray) -> None:
        if len(ids) > self.length:
            raise DataError(
                f"{row.where}: {len(ids)} tokens with those of its images, and data.sequence_length={self.length}; use "
                "a longer one, smaller images, or remove the row"
            )
        if self.image_token is not None and self.image_token not in ids:
            raise ConfigError(
                f"{row.where}: the processor puts no token image_token_id={self.image_token} of the model's config in "
                "the places of images; set data.processor to the model's own, or mend the config"
            )
        if not trained[1:].any():
            raise DataError(f"{row.where}: no token is trained on (data.train_on); remove the row, or add an answer")

    def _tensor(self, name: str, values: Any) -> Tensor:
        """Return a value for each token up to the length of a sequence, or the tensor of the row's images."""
        if name not in OF_TOKENS:
            return torch.as_tensor(np.stack([np.asarray(value) for value in values]))
        padding = self.processor.tokenizer.pad_token_id or 0 if name == "input_ids" else 0
        tokens = torch.tensor(values[0])
        return torch.nn.functional.pad(tokens, (0, self.length - len(tokens)), value=padding)

    def _labels(self, ids: np.ndarray, trained: np.ndarray) -> Tensor:
        labels = torch.full((self.length,), IGNORED)
        labels[: len(ids) - 1] = torch.from_numpy(np.where(trained[1:], ids[1:], IGNORED))
        return labels


def open_image_chats(job: Job, model_vocabulary: int | None) -> tuple[list[FileRow], FileDataset]:
    """Return the rows of a job of conversations with images, and what makes its data set of some of them.

    Raises:
        DataError: a row has no image, another number of them than places, or a file is missing.
    """
    processor = open_processor(job, CHAT)
    tokenizer, directory = processor.tokenizer, str(job.data.processor or job.model.path)
    check_vocabulary(max(tokenizer.get_vocab().values()) + 1, model_vocabulary, directory)
    template = ChatTemplate(
        tokenizer, TokenizerSource(Path(directory), ""), read_template(job.data) or processor.chat_template,
        job.data.model_copy(update={"format": "chat"}).trained_part,
    )  # fmt: skip
    rows = read_rows(job, (), COLUMNS)
    for row in rows:
        image_conversation(row)
    config, length = load_config(job), job.data.sequence_length
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    make = lambda some: ImageChats(some, processor, template, length, token)  # noqa: E731
    return rows, FileDataset(make, directory, OF_TOKENS | {"labels"})


def image_conversation(row: FileRow) -> ImageConversation:
    """Return the checked conversation of a row, and the files of its images.

    Raises:
        DataError: it has no image, another number of them than places, or a file is missing.
    """
    column = next((name for name in ("messages", "conversations") if row.columns.get(name) is not None), "messages")
    messages: Any = row.columns.get(column)
    listed = isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages)
    contents = [_parts(row, message) for message in messages] if listed else []
    texts = ["".join(part["text"] for part in parts if part["type"] == "text") for parts in contents]
    plain = [_with_text(message, text) for message, text in zip(messages, texts)] if listed else messages
    conversation = chat(row.where, {**row.columns, column: plain})
    first = len(conversation.messages) - len(contents)  # one more where the row has a column `system`
    added = [_parts(row, message) for message in conversation.messages[:first]]
    shown = [
        {**message, "content": [{name: part[name] for name in ("type", "text") if name in part} for part in parts]}
        for message, parts in zip(conversation.messages, [*added, *contents], strict=True)
    ]
    return ImageConversation(conversation._replace(messages=shown), _files(row, contents))


def _with_text(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {**message, **{name: text for name in ("content", "value") if message.get(name) is not None}}


def _parts(row: FileRow, message: Mapping[str, Any]) -> list[Part]:
    """Return a message's content as parts, each of text or of an image.

    Raises:
        DataError: it has others.
    """
    content = message.get("content")
    content = message.get("value") if content is None else content
    if isinstance(content, str):
        texts = [[{"type": "text", "text": text}] if text else [] for text in content.split(PLACE)]
        return [*texts[0], *chained.from_iterable([{"type": "image"}, *text] for text in texts[1:])]
    if not isinstance(content, list | None):  # the keys of an object would be taken for texts
        raise DataError(f"{row.where}: content {short(content)}; give a text, or a list of parts")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content or ()]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image") or (kind == "text" and not isinstance(part.get("text"), str)):
            raise DataError(f"{row.where}: a part {short(part)}; content has parts of type text, and of type image")
    return [dict(part) for part in parts]


def _files(row: FileRow, contents: Sequence[Sequence[Part]]) -> list[Path]:
    """Return the existing files of the images in the parts of messages."""
    images = [part for part in chained.from_iterable(contents) if part["type"] == "image"]
    named = row.columns.get("images") or row.columns.get("image") or []
    given = named if isinstance(named, list) else [named]
    values = [part.get("image") or part.get("path") for part in images]
    without = values.count(None)
    if without != len(given):
        raise DataError(
            f"{row.where}: {len(given)} images in the row and {without} places for them in its messages; give as many "
            f"parts of type image, or {PLACE} in a text, as there are images"
        )
    if not images:
        raise DataError(f"{row.where}: no image; every row has one at least, or ranks would run different layers")
    others = iter(given)
    return [row.file(next(others) if value is None else value, "image") for value in values]


def _moved(span: Span, places: Sequence[Mapping[str, Any]]) -> Span:
    """Return a span of the rendered text, in the text in which image tokens stand in the places of images."""

    def at(character: int) -> int:
        before = [place for place in places if place["span"][1] <= character]
        return character + (before[-1]["new_span"][1] - before[-1]["span"][1] if before else 0)

    return at(span[0]), at(span[1])
