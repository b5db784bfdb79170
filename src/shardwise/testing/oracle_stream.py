"""The oracle's own reader of a stream: shards from the first row on, in the plainest way, without blocks or workers.

Written from the definition in `data/streaming/definition.py`, not with its code. Shared with the engine are the list of
shards and how a compressed one is opened; rows are parsed, tokenized by transformers, ended, drawn and shuffled here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from tarfile import open as open_tar
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow.parquet import read_table
from transformers import AutoTokenizer

from shardwise.data.compressed import opened_text
from shardwise.data.streaming.sources import find_shards
from shardwise.data.tokenizer import facts_of
from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.testing.oracle_data import EVALUATION, DocumentStream, Places, TokenSource, mixed, shuffled_index

MOST_CHARACTERS = 1 << 24  # of a buffer


class StreamPlaces(Places):
    """The places of a stream by itself: sample c is its window c."""

    def training(self, counter: int) -> int:
        return counter


class StreamSource(TokenSource):
    """Windows of a stream."""

    def __init__(self, job: Job, tokenizer_directory: str | None) -> None:
        self.job, self.seed, self.length = job, job.training.seed, job.data.sequence_length
        self.causal, self.is_by_place = job.model.task == "causal_lm", True
        self.shards, self.container, _ = find_shards(job.data)
        if any("://" in shard.url for shard in self.shards):
            raise ConfigError(
                f"data.path={job.data.path or job.data.dataset!r}: verify reads a stream a second time by itself, from "
                "files; give it some shards on disk"
            )
        self.encode: Any = None
        if tokenizer_directory is not None:
            self.encode = AutoTokenizer.from_pretrained(tokenizer_directory)
            self.tokenizer = asdict(facts_of(self.encode))
        self._read, self.places = {}, StreamPlaces(self.seed, 0)
        wanted = job.data.validation_sequences * self.length + self.causal
        self.validation = DocumentStream.of(_enough(self._held_out(), wanted))
        self.validation_size = min(
            job.data.validation_sequences, (len(self.validation.tokens) - self.causal) // self.length
        )
        self._left, self._kept, self._count = self._documents(), list[np.ndarray](), 0

    def _place(self, counter: int) -> tuple[DocumentStream, int]:
        if counter >= EVALUATION:
            return self.validation, self.places.held_out(counter - EVALUATION)
        window = self.places.training(counter)
        needed = (window + 1) * self.length + 1
        if self._count < needed:
            while self._count < needed:
                self._kept.append(next(self._left))
                self._count += len(self._kept[-1])
            self.training = DocumentStream.of(self._kept)
        return self.training, window

    def _documents(self) -> Iterator[np.ndarray]:
        """Yield the documents that train, pass after pass."""
        shard, buffer, begin, characters = 0, list[Any](), (0, 0), 0
        while True:
            for row, value in self._rows(shuffled_index(self.seed, shard, len(self.shards))):
                buffer.append(value)
                characters += len(value)
                if len(buffer) == self.job.data.shuffle_buffer_size or characters >= MOST_CHARACTERS:
                    yield from self._shuffled(buffer, begin)
                    buffer, begin, characters = [], (shard, row + 1), 0
            shard += 1
            if shard % len(self.shards) == 0:
                yield from self._shuffled(buffer, begin)
                buffer, begin, characters = [], (shard, 0), 0

    def _shuffled(self, buffer: list[Any], begin: tuple[int, int]) -> Iterator[np.ndarray]:
        key = xxhash.xxh3_64_intdigest(f"{begin[0]}:{begin[1]}".encode())
        draws = np.random.Philox(key=np.array([self.seed, key], dtype=np.uint64)).random_raw(len(buffer)).tolist()
        for place in sorted(range(len(buffer)), key=lambda place: (draws[place], place)):
            ids = self._ids(buffer[place])
            if len(ids) and not self._is_held_out(ids):
                yield ids

    def _held_out(self) -> Iterator[np.ndarray]:
        """Yield the documents of one pass that do not train, in the order of the files."""
        for number in range(len(self.shards)):
            for _, value in self._rows(number):
                ids = self._ids(value)
                if len(ids) and self._is_held_out(ids):
                    yield ids

    def _is_held_out(self, ids: np.ndarray) -> bool:
        draw = mixed(mixed(self.seed) ^ xxhash.xxh3_64_intdigest(ids.tobytes()))
        return draw < int(self.job.data.validation_fraction * 2**64)

    def _ids(self, value: Any) -> np.ndarray:
        """Return the ids of a document with what ends it: the end of a text, or a separator."""
        is_text = isinstance(value, str)
        ids = list(self.encode(value, add_special_tokens=False)["input_ids"]) if is_text else list(value)
        if self.encode is not None and ids:
            end = self.encode.eos_token_id if self.encode.eos_token_id is not None else self.encode.sep_token_id
            ids += [] if end is None or ids[-1] == end else [end]
        return np.array(ids, dtype="<i4")

    def _rows(self, number: int) -> Iterator[tuple[int, Any]]:
        path, data = Path(self.shards[number].url), self.job.data
        column = "input_ids" if data.format == "tokens" and data.field == "text" else data.field
        if self.container == "parquet":
            yield from enumerate(read_table(path, columns=[column]).column(0).to_pylist())
        elif self.container == "dataset":
            with pa.memory_map(str(path)) as file:
                yield from enumerate(pa.ipc.open_stream(file).read_all().column(column).to_pylist())
        elif self.container == "webdataset":
            yield from enumerate(_samples(path, column))
        else:
            with opened_text(path) as lines:
                yield from ((row, json.loads(line)[column]) for row, line in enumerate(lines) if line.strip())


def _samples(path: Path, column: str) -> Iterator[str]:
    """Yield the texts of a tar: neighbouring members whose names are equal up to the first point are a sample."""
    with open_tar(path) as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        for _, members in groupby(files, key=lambda file: (file.name.rpartition("/")[0], _stem(file.name))):
            columns: dict[str, Any] = {}
            for member in members:
                content = archive.extractfile(member)
                extension = member.name.rpartition("/")[2].partition(".")[2]
                if content is not None and extension == "json":
                    columns |= json.loads(content.read())
                elif content is not None and extension == "txt":
                    columns["text"] = columns["txt"] = content.read().decode("utf-8-sig")
            yield columns[column]


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


def _enough(documents: Iterator[np.ndarray], tokens: int) -> list[np.ndarray]:
    """Return documents up to the one with which there are so many tokens."""
    kept, count = list[np.ndarray](), 0
    for document in documents:
        kept.append(document)
        count += len(document)
        if count >= tokens:
            break
    return kept
