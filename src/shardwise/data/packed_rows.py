"""Sequences of whole rows: conversations and pairs packed by first fit, or one a sequence, with masks and padding.

Exact definitions, for whoever wants to check them. S is the sequence length. Row r has n token ids t[0] … t[n - 1] and
for each whether it is trained on. Its labels are t[1] … t[n - 1] where that is trained on, else -100; the last position
has none. Rows without a label that counts are left out. Rows with n > S are left out too, or cut to S tokens where
`data.truncation` is on. Of the N rows that stay v = max(1, floor(N * validation_fraction)) are for validation.

Whole rows are ranked by `data/split.py`'s draw, equal ones by place. For validation are the first v of the ranking, or
with `validation_split: place` the last v of the corpus. Both splits take their rows in the order of the ranking, and
each row goes into the first sequence that has room for it, else into a new one; without `data.packing` always into a
new one. Sample c of training is then sequence order(seed, c, number of sequences), as everywhere.

In a sequence rows stand one behind the other, with positions from 0 and a document number each; padding is a document
of its own without labels. Unpacked rows have padding behind them, which no token of theirs sees: they need neither.

Pairs of preferences are two rows of the cache, chosen and rejected, each with the prompt. They stay or go together, are
drawn by the hash of the first, and stand in one sequence, one behind the other, as documents 2k and 2k + 1 of it. What
is said above of a row's length is said of both together, and a pair needs a label that counts in each. Where a pair of
n + m > S tokens is cut, each is cut to max(S // 2, S - the other's) tokens. One whose two are then equal is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor
from typing import NamedTuple

import numpy as np
import torch

from shardwise.data.batch import Batch
from shardwise.data.split import ranking
from shardwise.data.store import Column
from shardwise.errors import DataError
from shardwise.job.tasks import IGNORED

NO_TARGET = -1


class RowCorpus(NamedTuple):
    """The columns of a cache of rows."""

    tokens: Column
    trained: Column  # 1 for each token that is trained on
    starts: Column  # position of each row's first token
    hashes: Column  # `document_hash` of each row
    first_targets: Column  # place in its row of the first token that is trained on, from 1; NO_TARGET without any


class RowCounts(NamedTuple):
    """The rows of a corpus, by what becomes of them."""

    rows: int
    without_target: int  # left out; of rows that are cut, those whose targets, or what tells a pair apart, lie behind
    too_long: int  # left out
    truncated: int  # cut, and kept


class RowSettings(NamedTuple):
    """The keys of the job that say how rows become sequences.

    Attributes:
        together: rows of the cache that are one sample: 2 for pairs of preferences, else 1.
    """

    sequence_length: int
    packing: bool
    truncation: bool
    padding_id: int
    together: int = 1

    @property
    def isolates(self) -> bool:
        """True where a sequence holds several documents."""
        return self.packing or self.together > 1


@dataclass(frozen=True)
class PackedRows:
    """Sequences of whole rows.

    Attributes:
        corpus: the columns that are read.
        rows: [R] int64, numbers of the rows in the order in which they are packed; of pairs those of the first.
        settings: how.
        reference: [rows of the cache] float64, log-probability in nats of each completion by a reference model; where
            it is known ahead of training.
    """

    corpus: RowCorpus
    rows: np.ndarray
    settings: RowSettings
    reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def sequence_length(self) -> int:
        """S of the definitions above."""
        return self.settings.sequence_length

    @cached_property
    def sequences(self) -> list[list[int]]:
        """The rows of each sequence."""
        samples = [[int(row) + offset for offset in range(self.settings.together)] for row in self.rows]
        if not self.settings.packing:
            return samples
        bins = first_fit(self._sample_lengths.tolist(), self.sequence_length)
        return [[row for number in numbers for row in samples[number]] for numbers in bins]

    @cached_property
    def kept_lengths(self) -> np.ndarray:
        """Tokens of each row of the cache that stand in sequences, [rows of the cache] int64."""
        return _cut_lengths(_lengths(self.corpus), self.settings)

    @cached_property
    def _sample_lengths(self) -> np.ndarray:
        """Tokens of each sample, [R] int64, in the order in which they are packed."""
        together = self.settings.together
        return self.kept_lengths.reshape(-1, together).sum(1)[self.rows // together]

    @property
    def padding(self) -> int:
        """Positions of all sequences that hold no token."""
        return len(self) * self.sequence_length - int(self._sample_lengths.sum())

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids [n] and aligned labels [n] of a row, as far as a sequence holds it."""
        start = self.corpus.starts[number]
        stop = start + int(self.kept_lengths[number])
        ids = self.corpus.tokens.read(start, stop).astype(np.int64)
        labels = np.full(len(ids), IGNORED, dtype=np.int64)
        targets = self.corpus.trained.read(start + 1, stop).astype(bool)
        labels[:-1][targets] = ids[1:][targets]
        return ids, labels

    def batch(self, indices: Sequence[int], counters: Sequence[int], seed: int) -> Batch:
        """The sequences `indices`, as samples `counters` of a run; the seed plays no part."""
        size = (len(indices), self.sequence_length)
        ids, labels = np.full(size, self.settings.padding_id, dtype=np.int64), np.full(size, IGNORED, dtype=np.int64)
        positions, documents = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        ends = np.zeros(len(indices), dtype=np.int64)
        for place, index in enumerate(indices):
            end = 0
            for document, row in enumerate(self.sequences[index]):
                row_ids, row_labels = self.row(row)
                part = slice(end, end + len(row_ids))
                ids[place, part], labels[place, part] = row_ids, row_labels
                positions[place, part], documents[place, part] = np.arange(len(row_ids)), document
                end = part.stop
            positions[place, end:] = np.arange(self.sequence_length - end)
            documents[place, end:] = len(self.sequences[index])
            ends[place] = end
        inputs = {"input_ids": torch.from_numpy(ids)}
        if self.settings.isolates:
            inputs["position_ids"] = torch.from_numpy(positions)
        numbers = torch.from_numpy(documents) if self.settings.isolates else None
        return Batch(
            inputs=inputs,
            labels=torch.from_numpy(labels),
            rows=torch.tensor(counters, dtype=torch.int64),
            document_ids=numbers,
            is_token=torch.from_numpy(np.arange(self.sequence_length) < ends[:, None]),
            completions=numbers if self.settings.together == 2 else None,
            reference=None if self.reference is None else self._reference_of(indices, self.reference),
        )

    def _reference_of(self, indices: Sequence[int], values: np.ndarray) -> torch.Tensor:
        """Return the `values` [rows of the cache] of the completions in sequences, [B, C] in their order; else 0."""
        result = torch.zeros(len(indices), most_completions(self.sequence_length), dtype=torch.float64)
        for place, index in enumerate(indices):
            rows = self.sequences[index]
            result[place, : len(rows)] = torch.from_numpy(values[rows])
        return result

    def target_counts(self, sequences: int | None = None) -> np.ndarray:
        """Count how often each token id is a target of the first so many sequences (unset: of all), by id."""
        counts = np.zeros(0, dtype=np.int64)
        for rows in self.sequences[:sequences]:
            labels = np.concatenate([self.row(row)[1] for row in rows])
            block = np.bincount(labels[labels != IGNORED], minlength=len(counts))
            block[: len(counts)] += counts
            counts = block
        return counts

    def answers(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return (what stands before the first answer, the answer), token ids, of the first `count` rows that hold it.

        Raises:
            DataError: no row does: all are cut ahead of their first answer's end.
        """
        lengths, pairs = _lengths(self.corpus), list[tuple[list[int], list[int]]]()
        for row in map(int, self.rows):
            ids, labels = self.row(row)
            first = int(self.corpus.first_targets[row])
            end = first + int(np.flatnonzero(labels[first - 1 :] == IGNORED)[0])
            if end < len(ids) or len(ids) == lengths[row]:
                pairs.append((ids[:first].tolist(), ids[first:end].tolist()))
            if len(pairs) == count:
                break
        if not pairs:
            raise DataError(
                f"evaluation.answers={count}: each of {len(self.rows)} held-out rows is cut to "
                f"data.sequence_length={self.sequence_length} ahead of its first answer's end; use longer sequences, "
                "or leave evaluation.answers out"
            )
        return pairs

    def prompt(self, length: int) -> list[int]:
        """Return the last `length` token ids of the first row before the first that is trained on."""
        row = int(self.rows[0])
        ids, _ = self.row(row)
        return [int(token) for token in ids[: self.corpus.first_targets[row]][-length:]]


def split_rows(
    corpus: RowCorpus, rule: str, validation_fraction: float, seed: int, settings: RowSettings
) -> tuple[PackedRows, PackedRows, RowCounts]:
    """(training, validation) sequences as defined above, and what became of the rows.

    Raises:
        DataError: fewer than two rows stay.
    """
    together = settings.together
    whole, first = _lengths(corpus), corpus.first_targets.read(0, len(corpus.first_targets))
    lengths = whole.reshape(-1, together).sum(1)
    is_long = lengths > settings.sequence_length
    targets = (first != NO_TARGET) & (first < _cut_lengths(whole, settings))
    has_target = targets.reshape(-1, together).all(1)
    if together == 2 and settings.truncation:
        has_target &= ~_cut_alike(corpus, _cut_lengths(whole, settings), has_target & is_long)
    kept = has_target & (settings.truncation | ~is_long)
    counts = RowCounts(
        rows=len(lengths),
        without_target=int((~has_target).sum()),
        too_long=0 if settings.truncation else int((has_target & is_long).sum()),
        truncated=int((kept & is_long).sum()),
    )
    if kept.sum() < 2:
        raise DataError(_too_few(counts, settings, int(lengths.max(initial=0))))
    held_out = max(1, floor(int(kept.sum()) * validation_fraction))
    ranked = ranking(corpus.hashes.read(0, len(corpus.hashes))[::together], seed)
    ranked = ranked[kept[ranked]]
    if rule == "place":
        is_late = np.zeros(len(lengths), dtype=bool)
        is_late[np.flatnonzero(kept)[-held_out:]] = True
        train, validation = ranked[~is_late[ranked]], ranked[is_late[ranked]]
    else:
        train, validation = ranked[held_out:], ranked[:held_out]
    return PackedRows(corpus, train * together, settings), PackedRows(corpus, validation * together, settings), counts


def most_completions(sequence_length: int) -> int:
    """Return C, above all numbers of completions: one has two tokens at least, and padding has a number too."""
    return 2 * (sequence_length // 4 + 1)


def first_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the numbers of the rows in each bin: every row goes into the first bin that has room for it.

    A heap of the largest room over ranges of bins finds it in O(log n) (Johnson 1973, first fit).
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    rooms = [size] * (2 * leaves)  # a binary tree in an array: node i has the largest room of its nodes 2i and 2i + 1
    bins: list[list[int]] = []
    for number, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node *= 2
            node += rooms[node] < length
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(number)
        rooms[node] -= length
        while node > 1:
            node //= 2
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    return bins


def _lengths(corpus: RowCorpus) -> np.ndarray:
    """Return the number of tokens of each row, [R] int64."""
    starts = np.array(corpus.starts.read(0, len(corpus.starts)), dtype=np.int64)
    return np.diff(starts, append=len(corpus.tokens))


def _cut_lengths(lengths: np.ndarray, settings: RowSettings) -> np.ndarray:
    """Return as much of each row's length [R] as sequences hold of it, where rows that are too long are cut."""
    if not settings.truncation:
        return lengths
    if settings.together == 1:
        return np.minimum(lengths, settings.sequence_length)
    pairs = lengths.reshape(-1, 2)
    room = np.maximum(settings.sequence_length // 2, settings.sequence_length - pairs[:, ::-1])
    return np.minimum(pairs, room).ravel()


def _cut_alike(corpus: RowCorpus, kept: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Return which of the `asked` pairs [P] have two equal completions where rows are cut to `kept` [2 P] tokens."""

    def tokens(row: int) -> np.ndarray:
        start = int(corpus.starts[row])
        return corpus.tokens.read(start, start + int(kept[row]))

    alike = np.zeros(len(asked), dtype=bool)
    for pair in np.flatnonzero(asked).tolist():
        alike[pair] = np.array_equal(tokens(2 * pair), tokens(2 * pair + 1))
    return alike


def _too_few(counts: RowCounts, settings: RowSettings, longest: int) -> str:
    return (
        f"{counts.rows - counts.without_target - counts.too_long} of {counts.rows} rows are left, and one for training "
        f"and one for validation are needed: {counts.without_target} have no token that is trained on (data.train_on), "
        f"{counts.too_long} are longer than data.sequence_length={settings.sequence_length}, the longest has {longest} "
        "tokens; use a longer sequence, data.truncation, or more rows"
    )
