"""The sample order is a permutation of every epoch, and one that never changes."""

from __future__ import annotations

import pytest

from shardwise.data.order import order


@pytest.mark.parametrize("size", [1, 2, 3, 13, 64, 1000])
@pytest.mark.parametrize("epoch", [0, 7])
def test_every_epoch_is_a_permutation(size: int, epoch: int) -> None:
    found = [order(3, epoch * size + index, size) for index in range(size)]
    assert sorted(found) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return [order(seed, number * 1000 + index, 1000) for index in range(1000)]

    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)
    assert epoch(0, 0) != list(range(1000))


def test_order_is_spread_over_the_data_set() -> None:
    first = [order(0, index, 100_000) for index in range(1000)]
    assert 45_000 < sum(first) / len(first) < 55_000
    assert len({index // 10_000 for index in first}) == 10


def test_order_never_changes() -> None:
    assert [order(0, index, 13) for index in range(15)] == [5, 9, 11, 3, 6, 7, 4, 12, 10, 2, 1, 8, 0, 3, 0]
    assert [order(42, index, 1_000_000_007) for index in (0, 1, 10**12)] == [106220700, 871783597, 237008704]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="sample_index=-1"):
        order(0, -1, 5)
    with pytest.raises(ValueError, match="size=0"):
        order(0, 0, 0)
