"""Suspected mistakes that the reference makes on purpose, on labels of every shape."""

from __future__ import annotations

import pytest
import torch

from shardwise.data.order import order
from shardwise.testing.oracle import Twist, _twisted
from shardwise.testing.oracle_data import Rows, shuffled_index


def _rows(labels: torch.Tensor) -> Rows:
    return Rows({"x": torch.zeros(3, 2)}, labels, [0, 1, 2], None)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 17, 100])
def test_the_reference_orders_samples_by_the_definition(size: int) -> None:
    for counter in range(2 * size + 1):
        assert shuffled_index(7, counter, size) == order(7, counter, size)


def test_labels_of_tokens_are_shifted() -> None:
    shifted = _twisted(_rows(torch.tensor([[1, 2, 3]] * 3)), Twist(shift_labels=1)).labels
    assert shifted is not None and shifted[0].tolist() == [3, 1, 2]


def test_one_label_a_sample_has_no_position_to_shift() -> None:
    labels = torch.tensor([1, 2, 3])
    assert _twisted(_rows(labels), Twist(shift_labels=1)).labels is labels
