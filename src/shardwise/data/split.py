"""The split of a corpus into tokens that train and tokens that are held out for validation: two streams.

Exact definitions. The corpus has T tokens in documents, H of them are held out (`packing.split_windows` says how many).

`documents`: the draw of a document is mix(h ^ mix(seed)), where h is the XXH3-64 of its token ids as little-endian
int32 and mix is the finalizer of SplitMix64 (Steele et al. 2014) on 64 bits. Documents are held out by ascending draw,
equal draws by place, until they have H tokens; of the last one only the end is. All other tokens train. Both streams
keep the order of the corpus. Equal documents have equal draws, and a corpus that grows keeps most of what it held out.

`place`: tokens 0 … A - 1 train and the next H are held out, for a corpus whose order means something (time, say).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from shardwise.data.store import Column
from shardwise.job.data_section import DataSection


class TokenCorpus(NamedTuple):
    """The columns of a token cache."""

    tokens: Column
    documents: Column  # position of each document's first token
    hashes: Column  # `document_hash` of each document


class Tokens(Protocol):
    """Tokens one after the other, and where their documents begin: a `TokenStream`, or one that is read as it runs."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start … stop - 1."""

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the positions of start … stop - 1 at which a document begins."""


@dataclass(frozen=True)
class TokenStream:
    """Runs of a corpus' tokens, one after the other.

    Attributes:
        corpus: the columns that are read.
        runs: [R, 2] int64, first token and the one behind the last of each run, ascending. A run begins a document, or
            what the stream has of it.
    """

    corpus: TokenCorpus
    runs: np.ndarray

    @cached_property
    def offsets(self) -> np.ndarray:
        """[R + 1] int64: where each run begins in the stream, and the stream's length."""
        return np.concatenate([[0], np.cumsum(self.runs[:, 1] - self.runs[:, 0])])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop - 1 of the stream; a view of the file where they lie together."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{start}:{stop} of a stream of {len(self)} tokens")
        parts = [self.corpus.tokens.read(first, last) for first, last, _ in self._overlaps(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions of start … stop - 1 at which a document begins, or what the stream has of one; ascending."""
        documents, begins = self.corpus.documents, [np.empty(0, dtype=np.int64)]
        for first, last, position in self._overlaps(start, stop):
            low = bisect_left(documents, first)
            high = bisect_left(documents, last, lo=low)
            begins.append(documents.read(low, high) - first + position)
        low, high = np.searchsorted(self.offsets[:-1], [start, stop])
        return np.union1d(np.concatenate(begins), self.offsets[low:high])

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(first token, the one behind the last, position in the stream) of each run's share of start … stop - 1."""
        run = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self.offsets[run + 1]))
            first = int(self.runs[run, 0]) + start - int(self.offsets[run])
            yield first, first + end - start, start
            start, run = end, run + 1


def split_rule(data: DataSection) -> str:
    """`data.validation_split` with `auto` resolved: `documents`, or `place` for a data set of the user's own."""
    if data.validation_split != "auto":
        return data.validation_split
    return "place" if data.factory else "documents"


def split_tokens(
    corpus: TokenCorpus, rule: str, training: int, held_out: int, seed: int
) -> tuple[TokenStream, TokenStream]:
    """(training, validation) streams as defined above.

    Args:
        corpus: at least `training` + `held_out` tokens.
        rule: `documents` or `place`.
        training: A, the tokens that the training windows need.
        held_out: H, the tokens that the validation windows need.
        seed: of the draws.
    """
    if rule == "place":
        kept, validation = np.array([[0, training]]), np.array([[training, training + held_out]])
    else:
        validation = _drawn(corpus, held_out, seed)
        kept = _complement(validation, len(corpus.tokens))
    return TokenStream(corpus, kept), TokenStream(corpus, validation)


def document_hash() -> xxhash.xxh3_64:
    """A hash to be fed a document's token ids as little-endian int32."""
    return xxhash.xxh3_64()


def _drawn(corpus: TokenCorpus, held_out: int, seed: int) -> np.ndarray:
    """Runs of the held-out tokens, [R, 2]."""
    starts = np.array(corpus.documents.read(0, len(corpus.documents)), dtype=np.int64)
    stops = np.append(starts[1:], len(corpus.tokens))
    ranked = ranking(corpus.hashes.read(0, len(corpus.hashes)), seed)
    totals = np.cumsum((stops - starts)[ranked])
    last = int(np.searchsorted(totals, held_out))
    chosen = ranked[: last + 1]
    starts[chosen[-1]] += totals[last] - held_out
    chosen = np.sort(chosen)
    return np.stack([starts[chosen], stops[chosen]], axis=1)


def ranking(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Return the numbers of documents with these hashes [D], by ascending draw; equal draws by place."""
    return np.argsort(document_draws(hashes, seed), kind="stable")


def document_draws(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Return the draws [D] uint64 of documents with these hashes."""
    key = _mix(np.array([seed % (1 << 64)], dtype=np.uint64))
    return _mix(hashes.astype(np.uint64) ^ key)


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer of uint64 values; products wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _complement(runs: np.ndarray, size: int) -> np.ndarray:
    """The runs between `runs` of a corpus of `size` tokens, without empty ones."""
    edges = np.concatenate([[0], runs.ravel(), [size]]).reshape(-1, 2)
    return edges[edges[:, 0] < edges[:, 1]]
