"""TokenData: a job's data as sequences of tokens, with what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardwise.data.factory import Samples
from shardwise.data.mixture import Mixture
from shardwise.data.packed_rows import PackedRows, RowCounts
from shardwise.data.packing import Windows, entropy
from shardwise.data.split import TokenStream
from shardwise.data.streaming.loader import streamed_tokens
from shardwise.data.streaming.tokens import StreamedTokens
from shardwise.job.schema import Job


@dataclass(frozen=True)
class SourceFacts:
    """One source of a mixture.

    Attributes:
        job: that would read it alone.
        data: its own.
        measure: its weight from each of some samples on, or its passes in an epoch.
    """

    name: str
    job: Job
    data: TokenData
    measure: list[tuple[int, float]] | float

    def describe(self) -> dict[str, Any]:
        """For run.json and checkpoints: what it is, and its share."""
        return {
            "corpus": self.data.corpus,
            "content": self.data.content,
            "sequences": None if self.data.streams else len(self.data.train),
            "repeat" if isinstance(self.measure, float) else "weights": self.measure,
            **self.data.shards,
        }


@dataclass(frozen=True)
class TokenData:
    """A job's data, ready to be read by `loader.Stream`.

    `documents` and `tokens` count the whole data set (samples and 0 for a factory's). `content` is a hash of all token
    ids, and of which rows are trained on where: equal on every host, or the hosts do not train on the same data. Of
    rows that name files it is of the rows themselves; a factory's samples have none. `split` is the rule that held
    samples out: `documents` or `place`. `vocabulary_size` is the tokenizer's; without one, the model's, else the
    largest token id + 1. `row_counts` is of conversations and pairs alone. `sets` are those of `evaluation.sets` by
    name, and `content_of_sets` is a hash of their token ids. `reference_note` is a sentence on log-probabilities by a
    reference model, where they are known ahead of training. `sources` are those of a mixture, by name; their validation
    sequences are among `sets`.
    """

    train: Windows | PackedRows | Samples | Mixture
    validation: Windows | PackedRows | Samples | Mixture
    corpus: str
    documents: int
    tokens: int
    vocabulary_size: int
    split: str
    tokenizer_directory: str | None = None
    eos_id: int | None = None
    content: str = ""
    directory: str | None = None
    row_counts: RowCounts | None = None
    sets: Mapping[str, Windows | PackedRows] = field(default_factory=dict)
    content_of_sets: str = ""
    reference_note: str = ""
    sources: tuple[SourceFacts, ...] = ()

    def with_labels(self, ahead: bool, classes: tuple[int, int] | None) -> TokenData:
        """Return the same samples of a factory, with labels as a job's loss takes them (`Samples`)."""
        assert isinstance(self.train, Samples) and isinstance(self.validation, Samples)
        splits = (self.train, self.validation)
        train, validation = (replace(split, labels_ahead=ahead, classes=classes) for split in splits)
        return replace(self, train=train, validation=validation)

    @property
    def streams(self) -> dict[str, StreamedTokens]:
        """The tokens that are read as they are trained on, by the source that they are of; "" of one corpus."""
        return streamed_tokens(self.train)

    @property
    def shards(self) -> dict[str, dict[str, str]]:
        """The shards of a stream with what tells them from others, under one key; nothing of other data."""
        if self.sources or not self.streams:
            return {}
        [stream] = self.streams.values()
        return {"shards": {shard.name: f"{shard.size} {shard.stamp}" for shard in stream.definition.shards}}

    @cached_property
    def unigram_entropy(self) -> float | None:
        """Nats a token: entropy of the unigram distribution of the validation tokens. None for a factory's samples,
        pairs of preferences, and where the targets are spans, whose sentinels no text has."""
        return self.entropy_of(None)

    def entropy_of(self, sequences: int | None) -> float | None:
        """The same for the first so many validation sequences: those that an evaluation of that size measures."""
        windows = self.validation
        kind = windows.splits[0] if isinstance(windows, Mixture) else windows
        if isinstance(kind, Samples) or (isinstance(kind, Windows) and kind.spans):
            return None
        if isinstance(kind, PackedRows) and kind.settings.together > 1:
            return None
        assert not isinstance(windows, Samples)
        return entropy(windows.target_counts(sequences))

    def prompt(self, length: int) -> list[int]:
        """Token ids of the start of the first held-out document that has as many; else of the held-out tokens.

        Of rows: what stands before the first answer, or its last tokens.
        """
        if self.sources:
            return self.sources[0].data.prompt(length)
        windows = self.validation
        if isinstance(windows, Samples | Mixture):
            return []
        if isinstance(windows, PackedRows):
            return windows.prompt(length)
        assert isinstance(windows.stream, TokenStream)
        stop = min(len(windows.stream), windows.count * windows.sequence_length)
        starts = windows.stream.document_starts(0, max(0, stop - length) + 1)
        whole = starts[starts + length <= stop]
        start = int(whole[0]) if len(whole) else 0
        return [int(token) for token in windows.stream.read(start, min(start + length, stop))]

    def describe(self) -> dict[str, Any]:
        """For the display and run.json."""
        facts: dict[str, Any] = {
            "corpus": self.corpus,
            "documents": self.documents,
            "training_sequences": len(self.train),
            "validation_sequences": len(self.validation),
            "split": self.split,
        }
        facts |= {"sets": {name: len(split) for name, split in self.sets.items()}} if self.sets else {}
        if not isinstance(self.train, Samples):
            facts |= {
                "tokens": self.tokens,
                "sequence_length": self.train.sequence_length,
                "tokenizer": self.tokenizer_directory,
                "vocabulary_size": self.vocabulary_size,
                "unigram_entropy": self.unigram_entropy,
                "content": self.content,
                "cache": self.directory,
            }
        elif self.content:
            facts["content"] = self.content
        if self.sources:
            facts["sources"] = {source.name: source.describe() for source in self.sources}
        if self.streams:  # how much there is nobody has counted
            facts |= {"documents": None, "training_sequences": None, "tokens": None}
        facts |= self.shards
        if isinstance(self.train, PackedRows) and self.row_counts is not None:
            facts |= self.row_counts._asdict() | {"training_padding": self.train.padding}
        return facts

    def notes(self) -> list[str]:
        """Return sentences on rows that are not trained on, or not whole, and on the reference's log-probabilities."""
        if self.sources:
            return [f"{source.name}: {note}" for source in self.sources for note in source.data.notes()]
        if self.row_counts is None or not isinstance(self.train, PackedRows):
            return []
        counts, length = self.row_counts, self.train.sequence_length
        of_all = f"of {counts.rows:,} rows"
        longer = f"longer than data.sequence_length={length}"
        apart = ", or none that tells chosen from rejected," if self.train.settings.together == 2 else ""
        sentences = [
            (counts.without_target, f"{of_all} have no token that is trained on{apart} and are left out"),
            (counts.too_long, f"{of_all} are {longer} and are left out; data.truncation would cut them"),
            (counts.truncated, f"{of_all} are {longer} and are cut"),
        ]
        notes = [f"{count:,} {sentence}." for count, sentence in sentences if count]
        return [*notes, *([self.reference_note] if self.reference_note else [])]
