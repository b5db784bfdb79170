"""The default run's share of a test with many cases: `@pytest.mark.sampled(3)` leaves three of them, spread evenly.

The other cases are slow. Cases that are marked slow by themselves do not count.
"""

from __future__ import annotations

from collections import defaultdict

import pytest


class Samples:
    """Mark the cases of sampled tests as slow, but for as many as the mark says."""

    @pytest.hookimpl(tryfirst=True)  # before pytest deselects what is slow
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cases = defaultdict(list)
        for item in items:
            if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
                cases[item.nodeid.partition("[")[0]].append(item)
        for tests in cases.values():
            mark = tests[0].get_closest_marker("sampled")
            assert mark is not None
            kept = spread(len(tests), *mark.args)
            for place, test in enumerate(tests):
                if place not in kept:
                    test.add_marker(pytest.mark.slow)


def spread(count: int, share: int) -> set[int]:
    """Return `share` places among `count`, first and last included, as even as can be."""
    if share >= count:
        return set(range(count))
    return {round(number * (count - 1) / max(share - 1, 1)) for number in range(share)}
