"""The definition of a stream: which token is its n-th, as a pure function of its shards and a seed.

Exact definition. There are N shards; the s-th one read, s = 0, 1, …, is shard order(seed, s, N) of `data/order.py`, so
each pass has an order of its own. Rows are read one after the other, shard after shard, into a buffer. It is full with
B rows (`data.shuffle_buffer_size`) or, if that comes first, with `BUFFER_CHARACTERS` characters or token ids, and ends
with a pass too. The next one begins at the row that follows. The rows of a buffer that begins at row r of the s-th
shard are sorted by the first draws of Philox with key (seed, XXH3-64 of the text "s:r"), one for each row, equal draws
by place. Each row is a document: its token ids, ended as `data/prepare.py` ends them. It is held out for validation
where mix(h ^ mix(seed)) < floor(validation_fraction * 2^64), with h and mix of `data/split.py`. The stream is all
other documents one after the other, and sample c is its window at token c * sequence_length (`data/packing.py`).

What follows a buffer's beginning depends on nothing before it. A shard, a row and the number of tokens before them are
therefore a position from which a stream can be read on, on any number of ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from shardwise.data.order import order
from shardwise.data.split import document_draws

BUFFER_CHARACTERS = 1 << 24


class Position(NamedTuple):
    """The beginning of a buffer: of the s-th shard read, a row, and how many tokens of the stream come before."""

    shard: int = 0
    row: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Shard:
    """One file of a stream.

    Attributes:
        url: its path, or what fsspec opens.
        name: for messages and checkpoints: its path below what `data.path` names.
        size: bytes.
        stamp: its time of change, or what its server tells versions apart by.
    """

    url: str
    name: str
    size: int
    stamp: str


@dataclass(frozen=True)
class StreamDefinition:
    """All that the tokens of a stream depend on, but for its tokenizer; plain values, since a process is told them.

    Attributes:
        container: how a shard is read: jsonl, parquet, webdataset or dataset.
        column: that holds the text, or token ids where `holds_tokens`.
        end: token id that ends a document.
        limit: token ids are below it.
        held_out_below: draws below it hold a document out.
    """

    shards: tuple[Shard, ...]
    container: str
    column: str
    holds_tokens: bool
    end: int | None
    limit: int | None
    seed: int
    buffer_rows: int
    held_out_below: int
    skips_bad_files: bool

    def shard(self, number: int) -> Shard:
        """Return the shard that is read as the `number`-th."""
        return self.shards[order(self.seed, number, len(self.shards))]

    def is_held_out(self, ids: np.ndarray) -> bool:
        """Return whether a document of these token ids is validated with."""
        content = np.array([xxhash.xxh3_64_intdigest(ids.astype("<i4").tobytes())], dtype=np.uint64)
        return int(document_draws(content, self.seed)[0]) < self.held_out_below

    def permutation(self, shard: int, row: int, rows: int) -> np.ndarray:
        """Return the order in which the rows of a buffer, which begins there, are trained on."""
        place = xxhash.xxh3_64_intdigest(f"{shard}:{row}".encode())
        philox = np.random.Philox(key=np.array([self.seed, place], dtype=np.uint64))
        return np.argsort(philox.random_raw(rows), kind="stable")

    def to_json(self) -> dict[str, Any]:
        """Return the definition as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> StreamDefinition:
        """Return the definition of such values."""
        return cls(**{**values, "shards": tuple(Shard(**shard) for shard in values["shards"])})
