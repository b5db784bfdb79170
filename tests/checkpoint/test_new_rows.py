"""Rows of added tokens: the distribution that transformers draws them from, and the same bits on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from shardwise.checkpoint import new_rows
from shardwise.checkpoint.new_rows import SPREAD, GrownTensor


def grown(stored: Tensor, added: int, name: str = "embedding.weight") -> GrownTensor:
    def read(slices: Sequence[slice]) -> Tensor:
        return stored[tuple(slices)]

    return GrownTensor(read, tuple(stored.shape), added, 7, name)


def table(rows: int = 60, features: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, features, dtype=torch.float64, generator=generator)
    return (values @ torch.randn(features, features, dtype=torch.float64, generator=generator) + 3).to(dtype)


def test_rows_have_mean_and_covariance_of_the_old_ones() -> None:
    old = table()
    drawn = grown(old, 20_000).new_rows
    covariance = SPREAD * torch.cov(old.T, correction=0)
    assert torch.allclose(drawn.mean(0), old.mean(0), rtol=0, atol=1e-5)
    assert torch.linalg.norm(torch.cov(drawn.T) - covariance) < 0.05 * torch.linalg.norm(covariance)


def test_a_bias_has_the_mean_and_a_billionth_of_the_deviation() -> None:
    old = table()[:, 0]
    drawn = grown(old, 20_000).new_rows
    assert drawn.shape == (20_000,)
    assert torch.allclose(drawn - old.mean(), torch.zeros(()).double(), rtol=0, atol=1e-7)
    assert 0.9 < float(drawn.std() / (SPREAD * old.std())) < 1.1


def test_parts_are_those_of_the_whole() -> None:
    old = table(dtype=torch.float32)
    whole = grown(old, 4).part([])
    assert whole.dtype == torch.float32 and torch.equal(whole[:60], old)
    for rows in (slice(0, 10), slice(55, 64), slice(60, 64), slice(61, 63), slice(0, 60)):
        assert torch.equal(grown(old, 4).part([rows, slice(1, 3)]), whole[rows, 1:3])


def test_rows_are_the_same_bits_with_any_number_of_threads() -> None:
    old = table(3000, 48, torch.float32)
    threads = torch.get_num_threads()
    drawn = []
    with mock.patch.object(new_rows, "ELEMENTS_AT_ONCE", 1000 * 48):
        for number in (1, 2):
            torch.set_num_threads(number)
            drawn.append(grown(old, 3).new_rows)
            assert torch.get_num_threads() == number
    torch.set_num_threads(threads)
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], grown(old, 3, "head.weight").new_rows)
