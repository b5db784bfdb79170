"""Numbers on the tokens of a job: lengths, what is cut, which of the vocabulary occurs, what is there twice.

Each part of a job has numbers of its own, by its name; a job with one corpus has one part. A pair of preferences is
one document, of both completions with their prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise.data.packed_rows import PackedRows
from shardwise.data.packing import Windows
from shardwise.data.split import TokenStream
from shardwise.data.store import Column
from shardwise.data.token_data import TokenData
from shardwise.errors import ConfigError

QUANTILES = (0, 25, 50, 75, 90, 99, 100)
FREQUENT = 10  # token ids that are named
BLOCK = 1 << 22  # tokens that are counted at once


def statistics(parts: Sequence[tuple[str, TokenData]]) -> list[dict[str, Any]]:
    """Return the numbers of each part, by its name."""
    return [{"name": name, **_statistics(data)} for name, data in parts]


def _statistics(data: TokenData) -> dict[str, Any]:
    tokens, starts, hashes = _columns(data)
    together = data.train.settings.together if isinstance(data.train, PackedRows) else 1
    begins = np.array(starts.read(0, len(starts)), dtype=np.int64)[::together]
    lengths = np.diff(np.append(begins, len(tokens)))
    samples = hashes.read(0, len(hashes)).reshape(-1, together)
    axis = 0 if together > 1 else None  # of columns numpy is several times slower
    duplicates = len(samples) - len(np.unique(samples, axis=axis))
    facts = {
        "corpus": data.corpus,
        "documents": len(lengths),
        "tokens": len(tokens),
        "lengths": {str(share): int(np.percentile(lengths, share, method="lower")) for share in QUANTILES},
        "duplicates": duplicates,
        "duplicate_share": duplicates / len(lengths),
    }
    return facts | _fitting(data, lengths) | _vocabulary(tokens, data.vocabulary_size)


def _columns(data: TokenData) -> tuple[Column, Column, Column]:
    """Return the columns of tokens, of where documents or rows start, and of their hashes."""
    if isinstance(data.train, PackedRows):
        rows = data.train.corpus
        return rows.tokens, rows.starts, rows.hashes
    assert isinstance(data.train, Windows)  # commands refuse tensors
    if not isinstance(data.train.stream, TokenStream):
        raise ConfigError(
            f"{data.corpus} is read in training, so that nothing is counted; leave its streaming out here"
        )
    corpus = data.train.stream.corpus
    return corpus.tokens, corpus.documents, corpus.hashes


def _fitting(data: TokenData, lengths: np.ndarray) -> dict[str, Any]:
    """Return what does not fit into a sequence: documents that several share, or rows that are cut or left out."""
    assert isinstance(data.train, PackedRows | Windows)
    length = data.train.sequence_length
    facts: dict[str, Any] = {"sequence_length": length, "longer_share": float(np.mean(lengths > length))}
    counts = data.row_counts
    if counts is not None:
        facts |= {"cut_share": counts.truncated / counts.rows}
        facts |= {"left_out_share": (counts.too_long + counts.without_target) / counts.rows}
    return facts


def _vocabulary(tokens: Column, size: int) -> dict[str, Any]:
    counts = np.zeros(size, dtype=np.int64)
    for start in range(0, len(tokens), BLOCK):
        counts += np.bincount(tokens.read(start, min(start + BLOCK, len(tokens))), minlength=size)
    ranked = np.argsort(-counts, kind="stable")[:FREQUENT]
    return {
        "vocabulary_size": size,
        "vocabulary_seen": int(np.count_nonzero(counts)),
        "vocabulary_share": float(np.count_nonzero(counts) / size),
        "most_frequent": [[int(token), int(counts[token])] for token in ranked if counts[token]],
    }
