"""The shape of a placeholder follows from what its module was called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.model.facts import PlaceholderShape
from shardwise.model.placeholders import placeholder
from shardwise.model.stage_cut import placeholder_shape

ROWS, LENGTH, WIDTH = 2, 2, 8  # as many rows as positions, so that one may be taken for the other


@pytest.mark.parametrize(
    ("called", "output", "expected"),
    [
        ({0: torch.ones(ROWS, LENGTH)}, (ROWS, LENGTH, WIDTH), PlaceholderShape(0, end=2, width=WIDTH)),
        ({0: torch.ones(ROWS, LENGTH, 5)}, (ROWS, LENGTH, WIDTH), PlaceholderShape(0, end=2, width=WIDTH)),
        ({0: torch.ones(ROWS, LENGTH, WIDTH)}, (ROWS, LENGTH, WIDTH), PlaceholderShape(0)),
        (
            {0: (ROWS, LENGTH), 1: 0, "position_ids": torch.arange(LENGTH)},
            (LENGTH, WIDTH),
            PlaceholderShape("position_ids", end=1, width=WIDTH),
        ),
        ({0: torch.ones(3, LENGTH)}, (1, LENGTH, WIDTH), PlaceholderShape(0, 1, ones=1, width=WIDTH)),
    ],
)
def test_all_of_a_shape_goes_before_a_part(
    called: dict[int | str, Any], output: tuple[int, ...], expected: PlaceholderShape
) -> None:
    shape = placeholder_shape(called, torch.ones(output))
    assert shape == expected
    arguments = [value for key, value in called.items() if isinstance(key, int)]
    named = {key: value for key, value in called.items() if isinstance(key, str)}
    made = placeholder(shape, torch.float64, torch.device("cpu"))(*arguments, **named)
    assert made.shape == output and made.dtype == torch.float64


def test_nothing_follows_from_other_sizes() -> None:
    assert placeholder_shape({0: torch.ones(3, 5)}, torch.ones(4, WIDTH)) is None
