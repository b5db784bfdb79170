"""Data sets of one's own: what ranks compare of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.data.factory import Samples, content_hash, open_samples
from shardwise.errors import UserCodeError
from shardwise.job.data_section import DataSection


class Rows:
    """Rows whose labels depend on a salt, and whose inputs do, or differ each time."""

    def __init__(self, count: int = 20, salt: int = 0, is_random: bool = False) -> None:
        self._count, self._salt, self._is_random = count, salt, is_random

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(3) if self._is_random else torch.full((3,), float(self._salt))
        label = torch.tensor(index + self._salt, dtype=torch.bfloat16)
        return {"x": noise, "labels": label, "flag": torch.tensor(True)}


def hashed(rows: Rows) -> str:
    size = len(rows)
    return content_hash(Samples(rows, 0, size - 1, "rows"), Samples(rows, size - 1, 1, "rows"))


def test_ranks_compare_length_and_contents() -> None:
    assert hashed(Rows()) == hashed(Rows())
    assert hashed(Rows()) != hashed(Rows(count=21))
    assert hashed(Rows()) != hashed(Rows(salt=1))


def test_augmented_tensors_are_compared_by_their_shapes() -> None:
    assert hashed(Rows(is_random=True)) == hashed(Rows(is_random=True))
    assert hashed(Rows(is_random=True)) != hashed(Rows(count=21, is_random=True))
    assert hashed(Rows(is_random=True)) != hashed(Rows(salt=1, is_random=True))  # labels in another order


def test_a_sample_that_raises_is_named() -> None:
    with pytest.raises(UserCodeError, match=r"^rows: sample 3 raised KeyError: 3 \(.*test_factory\.py:\d+\)$"):
        Samples(Broken(), 1, 4, "rows").sample(2)


def test_tensors_that_are_not_stacked_stand_one_behind_the_other() -> None:
    training, validation = open_samples(DataSection(format="factory", factory=f"{__name__}:Patches"))
    batch = training.batch([1, 3], [1, 3], 0)
    assert batch.arguments()["patches"].tolist() == [1, 1, 3, 3, 3, 3]
    assert batch.arguments([1])["patches"].tolist() == [3, 3, 3, 3]
    assert batch.arguments()["x"].shape == (2, 3)
    assert validation.stacked == training.stacked == Patches.stacked


class Patches(Rows):
    """Rows with as many patches more as is their number."""

    stacked = frozenset(("x", "labels", "flag"))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "patches": torch.full((index + 1,), index)}


class Broken(Rows):
    """Rows of which one cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise KeyError(index)
