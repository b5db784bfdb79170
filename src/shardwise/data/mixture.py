"""Mixture: samples of several sources as one sequence, each with its source and its place there.

Exact definition. Sample c of training is of the source that `shares.Assignment` gives it. If n samples before it are of
that source, then it is that source's sequence order(s, n, size), where s is the first eight bytes of the BLAKE2b of the
text "seed:name", little endian, halved; and of a source that is a stream window n, as if it was trained on alone. A
source that a changed mixture goes on with has read more before: those count in n too. Held-out sample c is of the same
source, and there sequence n modulo the number of its held-out sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from shardwise.data.batch import Batch, in_order
from shardwise.data.order import order
from shardwise.data.packed_rows import PackedRows
from shardwise.data.packing import ENDLESS, Windows, is_stream
from shardwise.data.shares import Assignment


@dataclass(frozen=True)
class Mixture:
    """The training or the held-out samples of several sources.

    Attributes:
        names: of the sources, sorted.
        splits: the sequences of each.
        assignment: the source of each sample.
        seed: of the run.
        is_held_out: whether they are for validation.
        ahead: samples of each source that were read besides those of this assignment; empty: none.
    """

    names: tuple[str, ...]
    splits: tuple[Windows | PackedRows, ...]
    assignment: Assignment
    seed: int
    is_held_out: bool = False
    ahead: tuple[int, ...] = ()

    def __len__(self) -> int:
        """The samples of an epoch, or without one the sequences of all sources."""
        of_all = sum(self.assignment.epoch if not self.is_held_out else ()) or sum(map(len, self.splits))
        return min(of_all, ENDLESS)

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""
        return self.splits[0].sequence_length

    def counts(self, samples: int) -> list[int]:
        """Return how many samples of each source were read after so many of the run."""
        return [count + more for count, more in zip(self.assignment.counts(samples), self._ahead, strict=True)]

    @property
    def _ahead(self) -> tuple[int, ...]:
        return self.ahead or (0,) * len(self.names)

    def place_of(self, sample: int) -> tuple[int, int]:
        """Return the number of a sample's source, and of its sequence there."""
        source = self.assignment.source_of(sample)
        number, size = self.counts(sample)[source], len(self.splits[source])
        if self.is_held_out:
            return source, number % size
        if is_stream(self.splits[source]):
            return source, number
        return source, order(source_seed(self.seed, self.names[source]), number, size)

    def batch(self, indices: Sequence[int], counters: Sequence[int], seed: int) -> Batch:
        """The samples `indices` of the mixture, with `rows` = counters."""
        places = [self.place_of(index) for index in indices]
        parts = []
        for source, split in enumerate(self.splits):
            rows = [row for row, place in enumerate(places) if place[0] == source]
            if rows:
                of_rows = [places[row][1] for row in rows], [counters[row] for row in rows]
                parts.append((rows, split.batch(*of_rows, seed)))
        return in_order(parts)

    def target_counts(self, samples: int | None = None) -> np.ndarray:
        """Count how often each token id is a target of the first so many samples (unset: of all), by id."""
        total = np.zeros(0, dtype=np.int64)
        counts = self.assignment.counts(len(self) if samples is None else samples)
        for split, count in zip(self.splits, counts, strict=True):
            passes, rest = divmod(count, len(split))
            for factor, part in ((passes, None), (1, rest)):
                if factor and part != 0:
                    block = factor * split.target_counts(part)
                    longest = max(len(total), len(block))
                    total = np.pad(total, (0, longest - len(total))) + np.pad(block, (0, longest - len(block)))
        return total


def source_seed(seed: int, name: str) -> int:
    """Return the seed of a source's order."""
    return int.from_bytes(blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little") // 2
