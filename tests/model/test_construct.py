"""A module of one's own is built a second time, with values, where its initializers alone do not make them again."""

from __future__ import annotations

import pytest

from shardwise.model.construct import construct
from tests.habits import modules


@pytest.mark.parametrize(
    ("name", "needs_values"),
    [
        ("Stack", False),
        ("Attending", False),
        ("ParentInitialized", False),
        ("ParentBesideBlocks", False),
        ("ReplacedLayer", True),
        ("FilledAfterwards", True),
        ("Zeroed", True),
    ],
)
def test_values_are_needed_where_initializers_fill_otherwise_when_they_run_again(name: str, needs_values: bool) -> None:
    assert construct(getattr(modules, name), 0).needs_values is needs_values
