"""From a job's data section to a stream that is ready: shards listed, a tokenizer, and the validation set made once.

The validation set is the documents that are held out (`definition.py`), read in the order of the shards and their rows
until there are `data.validation_sequences` windows, or to the end of one pass. It is a token cache like any other.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.cache import cache_root
from shardwise.data.packing import Windows
from shardwise.data.readers import pieces
from shardwise.data.split import TokenCorpus, TokenStream
from shardwise.data.store import COMPLETE, Column, ColumnWriter, build_once, digest
from shardwise.data.streaming.definition import Shard, StreamDefinition
from shardwise.data.streaming.fetch import fetched_shard
from shardwise.data.streaming.rows import RowReader, Value
from shardwise.data.streaming.sources import FoundShards, describe_listing, find_shards
from shardwise.data.streaming.tokens import StreamedTokens, StreamSettings
from shardwise.data.streaming.workers import Encoder
from shardwise.data.text_encoder import TextEncoder
from shardwise.data.tokenized_text import text_encoder
from shardwise.data.tokenizer import TokenizerSource, check_vocabulary, facts_of, load_tokenizer
from shardwise.errors import DataError
from shardwise.job.data_section import DataSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

VERSION = 1  # of the validation set of a stream; part of its cache key
VALIDATION = "validation"
TOKENS, DOCUMENTS = "tokens.arrow", "documents.arrow"
PART = 1 << 20  # characters or ids that are tokenized at once
DRAWS = 1 << 64


@dataclass(frozen=True)
class StreamCorpus:
    """A stream's shards as a corpus that a tokenizer is trained on: rows in the order of the files.

    Attributes:
        source: the name of the one that it is among several; empty for the only one.
    """

    listing: FoundShards
    data: DataSection
    format: str
    identity: str
    source: str = ""

    def describe(self) -> str:
        """For the display."""
        return describe_listing(self.listing, self.data)

    def emptiness(self, unit: str) -> str:
        """Return the message for a source in which no document has any `unit`."""
        return f"{self.describe()} is empty: no row has any {unit} in its column {self.data.field!r} (data.field)"

    def texts(self) -> Iterator[tuple[str, bool]]:
        """(text, is the document's last piece) of all documents."""
        reader = RowReader(self.listing.container, self.data.field, False, None)
        try:
            for value in values_in_order(self.listing.shards, reader, self.data.on_bad_files == "skip"):
                yield from pieces(io.StringIO(str(value), newline=""))
        except DataError as error:
            raise DataError(f"data.sources, {self.source}: {error}" if self.source else str(error)) from error


def find_stream(data: DataSection, source: str = "") -> StreamCorpus:
    """Return the shards of a job that streams, or of one of its sources."""
    listing = find_shards(data)
    name = "tokens" if data.format == "tokens" else listing.container
    identity = digest(name, data.field, [asdict(shard) for shard in listing.shards])
    return StreamCorpus(listing, data, name, identity, source)


def values_in_order(shards: Sequence[Shard], reader: RowReader, skips: bool) -> Iterator[Value]:
    """Yield the values of all rows, shard by shard as they are listed; `skips`: what cannot be read of one is none.

    Raises:
        DataError: a shard is missing or changed, or is damaged and not skipped.
    """
    with TemporaryDirectory(prefix="shardwise-stream-") as directory:
        for shard in shards:
            with fetched_shard(shard, Path(directory), lambda **facts: None) as path:
                try:
                    for _, value in reader.values(path, shard.name, 0):
                        yield value
                except DataError:
                    if not skips:
                        raise


class PreparedStream:
    """A stream with its tokenizer."""

    def __init__(
        self, corpus: StreamCorpus, source: TokenizerSource | None, model_vocabulary: int | None, seed: int
    ) -> None:
        self.corpus, self.source, self.data = corpus, source, corpus.data
        tokenizer = load_tokenizer(source) if source else None
        self.facts = facts_of(tokenizer) if tokenizer else None
        if self.facts and source:
            check_vocabulary(self.facts.vocabulary_size, model_vocabulary, source.directory)
        self.limit = self.facts.vocabulary_size if self.facts else model_vocabulary
        self.tokenizer = (
            None if source is None or tokenizer is None or self.holds_tokens else fast_encoder(tokenizer, source)
        )
        self.definition = StreamDefinition(
            shards=corpus.listing.shards,
            container=corpus.listing.container,
            column="input_ids" if self.holds_tokens and self.data.field == "text" else self.data.field,
            holds_tokens=self.holds_tokens,
            end=self.facts.eos_id if self.facts else None,
            limit=self.limit,
            seed=seed,
            buffer_rows=self.data.shuffle_buffer_size,
            held_out_below=int(self.data.validation_fraction * DRAWS),
            skips_bad_files=self.data.on_bad_files == "skip",
        )

    @property
    def holds_tokens(self) -> bool:
        """True for rows of token ids."""
        return self.corpus.format == "tokens"

    @property
    def content(self) -> str:
        """Hash of what all hosts must have alike: the shards' names and sizes, the tokenizer, the rules.

        Whether damaged shards are passed over is none: up to one the tokens are the same, and a run may go on so.
        """
        values = self.definition.to_json()
        del values["skips_bad_files"]
        shards = [(shard["name"], shard["size"]) for shard in values.pop("shards")]
        return digest(shards, values, None if self.tokenizer is None else asdict(self.tokenizer))

    @property
    def root(self) -> Path:
        """Return the directory in which streams keep what they need."""
        return cache_root(self.data.cache_directory) / "streams"

    def training_tokens(self) -> StreamedTokens:
        """Return the stream that trains."""
        workers = self.data.num_workers or default_workers()
        return StreamedTokens(
            self.definition,
            StreamSettings(self.root / "running", self.data.cache_limit, workers, self.tokenizer),
        )

    def validation(self, say: Callable[[str], None], extra: int) -> tuple[Windows, dict[str, Any]]:
        """Return the validation windows, causal ones, and what is known of them."""
        needed = self.data.validation_sequences * self.data.sequence_length + extra
        key = digest(VERSION, self.content, [shard.stamp for shard in self.definition.shards], needed)
        directory = self.root / VALIDATION / key
        build_once(directory, partial(self._build, needed=needed, say=say), say)
        known = json.loads((directory / COMPLETE).read_text())
        corpus = TokenCorpus(*(Column(directory / name) for name in (TOKENS, DOCUMENTS, DOCUMENTS)))
        length = self.data.sequence_length
        count = min(self.data.validation_sequences, (len(corpus.tokens) - extra) // length)
        if count < 1:
            raise DataError(
                f"{self.corpus.describe()}: a pass through it holds out {len(corpus.tokens)} tokens for validation, "
                f"fewer than one sequence of data.sequence_length={length}; raise "
                f"data.validation_fraction={self.data.validation_fraction:g}, or give more text"
            )
        stream = TokenStream(corpus, np.array([[0, count * length + extra]]))
        return Windows(stream, count, length), {**known, "directory": str(directory)}

    def _build(self, target: Path, needed: int, say: Callable[[str], None]) -> None:
        """Write the tokens that are held out, in the order of the shards, and where their documents begin."""
        say(f"reading {self.corpus.describe()} for up to {needed:,} tokens of validation")
        encoder = Encoder(self.definition, self.tokenizer)
        read, largest = 0, -1
        with ColumnWriter(target / TOKENS, np.int32) as tokens, ColumnWriter(target / DOCUMENTS, np.int64) as starts:
            for ids, is_held_out in self._documents(encoder):
                read += len(ids)
                largest = max(largest, int(ids.max(initial=-1)))
                if is_held_out:
                    starts.extend([tokens.length])
                    tokens.extend(ids)
                if tokens.length >= needed:
                    break
        if not read:
            raise DataError(self.corpus.emptiness("token"))
        (target / COMPLETE).write_text(json.dumps({"documents": starts.length, "largest_token": largest}))

    def _documents(self, encoder: Encoder) -> Iterator[tuple[np.ndarray, bool]]:
        definition = self.definition
        reader = RowReader(definition.container, definition.column, definition.holds_tokens, definition.limit)
        part, size = list[Value](), 0
        for value in values_in_order(definition.shards, reader, definition.skips_bad_files):
            part.append(value)
            size += len(value)
            if size >= PART:
                yield from encoder.encode(part)
                part, size = [], 0
        yield from encoder.encode(part)


def default_workers() -> int:
    """Return how many processes of a host tokenize where the job does not say."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def fast_encoder(tokenizer: PreTrainedTokenizerBase, source: TokenizerSource) -> TextEncoder:
    """Return what encodes as a tokenizer does in processes that have the tokenizers library alone.

    Raises:
        DataError: it is written in Python, or does more than the library.
    """
    encoder = text_encoder(tokenizer, source)
    if not isinstance(encoder, TextEncoder):
        raise DataError(
            f"the tokenizer in {source.directory} is written in Python, or does more than its tokenizer.json says, and "
            "a stream is tokenized by the tokenizers library; save it as a fast one, or leave data.streaming out"
        )
    return encoder
