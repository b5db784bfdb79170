"""Rows of added tokens behind a tensor of a file, drawn from what the file holds.

`resize_token_embeddings` of transformers draws them from a normal distribution with the mean of the old rows and 1e-9
of their covariance, so that a model says what it said before (nlp.stanford.edu/~johnhew/vocab-expansion.html). Here
they are mean + sqrt(1e-9 / V) Z (X - mean), with standard normal Z [rows, V]: the same distribution, without the
covariance [H, H]. A rank that holds one of them reads the old rows, a few at a time, and draws what any other would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

SPREAD = 1e-9  # of the covariance; of the deviation where the tensor is a bias: transformers' numbers
ELEMENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class GrownTensor:
    """A tensor [V, ...] of a file with `added` rows behind its own, which depend on (its values, seed, name) alone.

    Args:
        read: returns the part of the file's tensor that slices, one for each leading dim, cut out.
        stored: shape in the file.
        name: of the model's parameter.
    """

    read: Callable[[Sequence[slice]], Tensor]
    stored: tuple[int, ...]
    added: int
    seed: int
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with the added rows."""
        return (self.stored[0] + self.added, *self.stored[1:])

    def part(self, slices: Sequence[slice]) -> Tensor:
        """Return the part of the grown tensor that slices cut out, in memory of its own."""
        rows, *others = slices or [slice(None)]
        start, stop, _ = rows.indices(self.shape[0])
        old = self.stored[0]
        parts = []
        if start < min(stop, old):
            parts.append(self.read([slice(start, min(stop, old)), *others]))
        if stop > max(start, old):
            parts.append(self.new_rows[(slice(max(start - old, 0), stop - old), *others)])
        return torch.cat(parts)

    @cached_property
    def new_rows(self) -> Tensor:
        """The added rows, in the dtype of the file."""
        digest = blake2b(f"{self.seed}/{self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        rows, features = self.stored[0], math.prod(self.stored[1:])
        total, weights = torch.zeros(features, dtype=torch.float64), torch.zeros(self.added, 1, dtype=torch.float64)
        drawn = torch.zeros(self.added, features, dtype=torch.float64)
        step = max(1, ELEMENTS_AT_ONCE // max(1, features))
        with _one_thread():
            for start in range(0, rows, step):
                part = self.read([slice(start, min(start + step, rows))])
                values = part.double().reshape(len(part), features)
                normal = torch.randn(self.added, len(values), dtype=torch.float64, generator=generator)
                total += values.sum(0)
                drawn += normal @ values
                weights += normal.sum(1, keepdim=True)
        mean = total / rows
        factor = (math.sqrt(SPREAD) if len(self.stored) > 1 else SPREAD) / math.sqrt(rows)
        return (mean + factor * (drawn - weights * mean)).view(self.added, *self.stored[1:]).to(part.dtype)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sum in one order inside, however many threads this rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
