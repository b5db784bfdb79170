"""The default run takes an even share of the cases of a sampled test."""

from __future__ import annotations

import pytest

from tests.plugins.sampled import spread


@pytest.mark.parametrize(
    ("count", "share", "places"),
    [(10, 1, {0}), (10, 2, {0, 9}), (10, 4, {0, 3, 6, 9}), (3, 3, {0, 1, 2}), (2, 5, {0, 1})],
)
def test_a_share_is_spread_over_all_cases(count: int, share: int, places: set[int]) -> None:
    assert spread(count, share) == places


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [1, 2])
def test_the_cases_that_are_left_out_are_slow(case: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("slow") is not None) == (case == 2)
