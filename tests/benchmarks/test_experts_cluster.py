"""The exchange between hosts, in network namespaces: both ways give the same bits, and fewer rows cross."""

from __future__ import annotations

import pytest

from benchmarks import experts_cluster
from benchmarks.cluster import obstacle


def test_rows_cross_once_a_host() -> None:
    rows, busiest = experts_cluster.crossing_rows(64)
    assert rows["once a host"] < rows["once an expert"] < 4 * 64 * 8
    assert 4 * busiest >= rows["once a host"]


@pytest.mark.slow
@pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be a cluster")
def test_two_levels_give_the_bits_of_one_exchange() -> None:
    row = experts_cluster.measure(rounds=1, tokens=64)  # the ranks raise where they disagree
    assert row["ranks"] == 8 and set(row["seconds"]) == set(experts_cluster.CONTENDERS)
