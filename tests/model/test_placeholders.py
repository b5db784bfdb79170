"""The shape of a placeholder follows from what its module was called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.model.facts import PlaceholderShape
from shardwise.model.placeholders import AbsentWeights, placeholder
from shardwise.model.stage_cut import placeholder_shape

CPU = torch.device("cpu")
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


def test_an_absent_weight_says_its_dtype_and_no_more() -> None:
    head: Any = torch.nn.Linear(2, 3, bias=False)
    lost = AbsentWeights(torch.bfloat16, CPU)
    assert not lost.drop(head, placeholder(None, torch.float64, CPU))
    assert not list(head.parameters()) and not head.state_dict() and head.weight is None
    with lost.shown():
        assert (head.weight.dtype, head.weight.device) == (torch.bfloat16, CPU)
        assert torch.ones(2).to(head.weight.dtype).dtype == torch.bfloat16
        with pytest.raises(AttributeError, match="AbsentWeight"):
            _ = head.weight.shape
        with pytest.raises(TypeError, match="AbsentWeight"):
            _ = torch.ones(2) * head.weight
    assert head.weight is None


def test_what_is_kept_is_not_lost() -> None:
    norm: Any = torch.nn.LayerNorm(2)
    assert AbsentWeights(torch.float32, CPU).drop(norm, placeholder(None, torch.float32, CPU), {id(norm.weight)})
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
