"""Windows of the token stream: what one sample of a language model is.

Exact definitions, for whoever wants to check them. `T` tokens are the documents' token ids one after the other, each
document ended by the end-of-sequence token where the tokenizer has one. S is the sequence length; e is 1 for
`causal_lm` (a label is the next token) and 0 for `masked_lm` and `seq2seq_lm`.

    n = (T - 2e) // S                         windows in all
    v = max(1, floor(n * validation_fraction))  validation windows; a = n - v training windows; a >= 1
    training window i:    train[i*S : i*S + S + e],             0 <= i < a
    validation window i:  validation[j*S : j*S + S + e],        0 <= i < v

where `train` and `validation` are the two streams of `data/split.py`, which share no token, with v*S + e tokens held
out. Where documents are held out, j = order(seed, i, v), so that a short evaluation reads a little of all of them; else
j = i. Causal: input_ids = window[:-1], labels = window[1:]. With `isolate_documents`, position_ids restart at 0 at each
document's first token in the window, and a label that belongs to another document than its input is -100.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np
import torch

from shardwise.data.batch import Batch
from shardwise.data.order import order
from shardwise.data.split import TokenCorpus, Tokens, TokenStream, split_tokens
from shardwise.errors import DataError
from shardwise.job.tasks import IGNORED

COUNT_BLOCK = 1 << 22
ENDLESS = 1 << 62  # windows of a stream, which begins again where it ends


@dataclass(frozen=True)
class Masking:
    """BERT's masking: of the chosen tokens 80 % become the mask, 10 % any token, 10 % stay."""

    probability: float
    mask_id: int
    vocabulary_size: int
    special_ids: tuple[int, ...]


@dataclass(frozen=True)
class Spans:
    """T5's span corruption (arXiv 1910.10683, section 3.1.4): a sentinel stands for each span that is left out."""

    probability: float
    mean_length: float
    sentinel_ids: tuple[int, ...]
    eos_id: int | None  # ends inputs and labels, where there is one

    def counts(self, length: int) -> tuple[int, int]:
        """(tokens left out, spans) of a window of `length` tokens: the same in all, so that shapes are."""
        tokens = min(max(round(length * self.probability), 1), length - 1)
        return tokens, min(max(round(tokens / self.mean_length), 1), length - tokens)


@dataclass(frozen=True)
class Windows:
    """`count` windows of `sequence_length` tokens (plus one, causal) of a stream; stride is the sequence length."""

    stream: Tokens
    count: int
    sequence_length: int
    masking: Masking | None = None  # with neither: causal
    spans: Spans | None = None
    isolate_documents: bool = False
    mixed_by: int | None = None  # seed of the windows' order; None: as they stand in the stream

    def __len__(self) -> int:
        return self.count

    @property
    def extra(self) -> int:
        """e of the definitions above."""
        return _extra(self.masking, self.spans)

    def window(self, index: int) -> np.ndarray:
        """Token ids of one window, [S + e]."""
        start = self.start_of(index)
        return self.stream.read(start, start + self.sequence_length + self.extra)

    def start_of(self, index: int) -> int:
        """Position of a window's first token in the stream."""
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        return self.sequence_length * (index if self.mixed_by is None else order(self.mixed_by, index, self.count))

    def batch(self, indices: Sequence[int], counters: Sequence[int], seed: int) -> Batch:
        """The windows `indices`, as samples `counters` of a run with this seed."""
        windows = np.stack([self.window(index) for index in indices]).astype(np.int64)
        if self.extra:
            inputs, labels = windows[:, :-1], windows[:, 1:].copy()
        else:
            pairs = [self._pair(row, seed, counter) for row, counter in zip(windows, counters, strict=True)]
            inputs, labels = np.stack([pair[0] for pair in pairs]), np.stack([pair[1] for pair in pairs])
        named = {"input_ids": torch.from_numpy(np.ascontiguousarray(inputs))}
        numbers = self._isolate(indices, named, labels) if self.isolate_documents else None
        return Batch(
            inputs=named,
            labels=torch.from_numpy(labels),
            rows=torch.tensor(counters, dtype=torch.int64),
            document_ids=numbers,
        )

    def _pair(self, window: np.ndarray, seed: int, counter: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels) of a window that is not read causally."""
        if self.spans:
            return leave_out(window, self.spans, seed, counter)
        assert self.masking is not None
        return mask(window, self.masking, seed, counter)

    def _isolate(self, indices: Sequence[int], named: dict[str, torch.Tensor], labels: np.ndarray) -> torch.Tensor:
        """Document numbers [B, S]; adds position_ids and clears labels of another document than their input's."""
        size = self.sequence_length
        numbers = np.stack([self.document_numbers(index) for index in indices])  # [B, S + e]
        if self.extra:
            labels[numbers[:, 1:] != numbers[:, :-1]] = IGNORED
        numbers = np.ascontiguousarray(numbers[:, :size])
        steps = np.broadcast_to(np.arange(size), numbers.shape)
        first = np.diff(numbers, axis=1, prepend=numbers[:, :1]) != 0
        named["position_ids"] = torch.from_numpy(steps - np.maximum.accumulate(np.where(first, steps, 0), axis=1))
        return torch.from_numpy(numbers)

    def document_numbers(self, index: int) -> np.ndarray:
        """For each token of a window, [S + e] int64: the number of its document within the window, from 0."""
        start, length = self.start_of(index), self.sequence_length + self.extra
        begins = np.zeros(length, dtype=np.int64)
        begins[self.stream.document_starts(start + 1, start + length) - start] = 1
        return np.cumsum(begins)

    def target_counts(self, windows: int | None = None) -> np.ndarray:
        """Count how often each token id is a target of the first `windows` windows (unset: of all), by id.

        Targets are the tokens that the loss can be measured on: all but the very first for a causal LM.
        """
        counts = np.zeros(0, dtype=np.int64)
        for start, stop in self._target_ranges(self.count if windows is None else min(windows, self.count)):
            block = np.bincount(self.stream.read(start, stop), minlength=len(counts))
            block[: len(counts)] += counts
            counts = block
        return counts

    def _target_ranges(self, windows: int) -> Iterator[tuple[int, int]]:
        """Stretches of the stream that hold the targets of the first so many windows."""
        size = self.sequence_length
        if self.mixed_by is not None and windows < self.count:
            for index in range(windows):
                start = self.start_of(index) + self.extra
                yield start, start + size
            return
        end = self.extra + windows * size
        for start in range(self.extra, end, COUNT_BLOCK):
            yield start, min(end, start + COUNT_BLOCK)


def is_stream(split: object) -> bool:
    """Return whether a split is windows of tokens that are read as they are trained on, and only forward."""
    return isinstance(split, Windows) and not isinstance(split.stream, TokenStream)


def split_windows(
    corpus: TokenCorpus, rule: str, sequence_length: int, validation_fraction: float, seed: int, **options: Any
) -> tuple[Windows, Windows]:
    """(training, validation) windows as defined above.

    Args:
        corpus: the token cache's columns.
        rule: `documents` or `place`, which tokens are held out.
        sequence_length: S.
        validation_fraction: share of the windows that are held out.
        seed: of the held-out documents and of the order of their windows.
        options: further fields of Windows.

    Raises:
        DataError: there are too few tokens for a window of each.
    """
    tokens, extra = len(corpus.tokens), _extra(options.get("masking"), options.get("spans"))
    count = (tokens - 2 * extra) // sequence_length
    if count < 2:
        raise DataError(_too_few(tokens, sequence_length, (tokens - 2 * extra) // 2))
    validation = max(1, floor(count * validation_fraction))
    needed = (count - validation) * sequence_length + extra
    train, held_out = split_tokens(corpus, rule, needed, validation * sequence_length + extra, seed)
    common = {"sequence_length": sequence_length, **options}
    mixed_by = seed if rule == "documents" else None
    return Windows(train, count - validation, **common), Windows(held_out, validation, mixed_by=mixed_by, **common)


def _too_few(tokens: int, sequence_length: int, largest: int) -> str:
    remedy = f" or a data.sequence_length of at most {largest}" if largest > 0 else ""
    return (
        f"the data set has {tokens} tokens: too few for a training and a validation sequence of "
        f"data.sequence_length={sequence_length}; use more text{remedy}"
    )


def _extra(masking: Masking | None, spans: Spans | None) -> int:
    return 0 if masking or spans else 1


def leave_out(tokens: np.ndarray, spans: Spans, seed: int, counter: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels) of one window [S] with spans left out: a pure function of (tokens, seed, sample counter).

    With (N, K) of `Spans.counts`, the window is K times a stretch that stays and a span that goes. The lengths of the
    spans are a composition of N into K parts: they end after 1 + i tokens for the K - 1 smallest of the first N - 1
    64-bit draws, i of 0 … N - 2, from Philox with key (seed, counter); those of the stretches one of S - N, by the next
    S - N - 1. Inputs are the stretches, each followed by its sentinel; labels are the spans, each after its sentinel.
    """
    left_out, count = spans.counts(len(tokens))
    bits = np.random.Philox(key=np.array([seed, counter], dtype=np.uint64))
    gone = _composition(bits.random_raw(left_out - 1), left_out, count)
    kept = _composition(bits.random_raw(len(tokens) - left_out - 1), len(tokens) - left_out, count)
    ends = np.cumsum(np.stack([kept, gone], axis=1).ravel())
    parts = np.split(tokens, ends[:-1])
    sentinels = np.array(spans.sentinel_ids[:count])[:, None]
    end = [] if spans.eos_id is None else [np.array([spans.eos_id])]
    inputs = [piece for pair in zip(parts[0::2], sentinels) for piece in pair]
    labels = [piece for pair in zip(sentinels, parts[1::2]) for piece in pair]
    return np.concatenate(inputs + end), np.concatenate(labels + end)


def _composition(draws: np.ndarray, total: int, parts: int) -> np.ndarray:
    """Lengths of `parts` parts that make up `total`, cut where the draws are smallest."""
    cuts = np.sort(np.argsort(draws, kind="stable")[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)


def mask(tokens: np.ndarray, masking: Masking, seed: int, counter: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels) of one masked sequence: a pure function of (tokens, seed, sample counter).

    Three rows of 64-bit draws r from Philox with key (seed, counter): token t is chosen where it is not special and
    r[0, t] < probability * 2**64; r[1, t] % 10 in 0 … 7 puts the mask there, 8 the token r[2, t] % vocabulary, 9 leaves
    it. Labels are the chosen tokens, -100 elsewhere.
    """
    bits = np.random.Philox(key=np.array([seed, counter], dtype=np.uint64))
    draws = bits.random_raw(3 * len(tokens)).reshape(3, len(tokens))
    chosen = draws[0] < np.uint64(int(masking.probability * 2**64))
    chosen &= ~np.isin(tokens, masking.special_ids)
    kind = draws[1] % np.uint64(10)
    inputs = np.where(chosen & (kind < 8), masking.mask_id, tokens)
    anything = (draws[2] % np.uint64(masking.vocabulary_size)).astype(np.int64)
    inputs = np.where(chosen & (kind == 8), anything, inputs)
    return inputs, np.where(chosen, tokens, IGNORED)


def entropy(counts: np.ndarray) -> float:
    """-Σ p ln p in nats of the distribution with these counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
