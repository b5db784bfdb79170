"""Ranks that are slower than those with the same work are found, by the kind of time."""

from __future__ import annotations

from typing import Any

from shardwise.observe.stragglers import RankPlace, find_stragglers

PLACES = [RankPlace(rank, f"node{rank // 2}", f"cuda:{rank % 2}", rank // 2) for rank in range(4)]


def record(compute: list[float], data: list[float] | None = None) -> dict[str, Any]:
    return {"compute_seconds": compute, "data_seconds": data or [0.01] * 4, "seconds": max(compute) + 0.1}


def test_even_ranks_are_none() -> None:
    assert find_stragglers([record([1.0, 1.2, 3.0, 2.8])] * 20, PLACES) == []  # stages differ


def test_a_slow_rank_is_named_with_its_place() -> None:
    (slow,) = find_stragglers([record([1.0, 1.0, 2.0, 3.6])] * 20, PLACES)
    assert (slow.place.rank, slow.kind, slow.seconds, slow.usual) == (3, "compute_seconds", 3.6, 2.0)
    assert str(slow).startswith("rank 3 (node1, cuda:1) is slow: computation takes it 3.6 s a step, 2 s the ranks with")


def test_the_wait_for_data_is_told_apart() -> None:
    (slow,) = find_stragglers([record([1.0] * 4, [0.01, 0.9, 0.01, 0.01])] * 20, PLACES)
    assert (slow.place.rank, slow.kind) == (1, "data_seconds")


def test_one_slow_step_and_what_costs_nothing_are_none() -> None:
    assert find_stragglers([record([1.0, 9.0, 1.0, 1.0]), *[record([1.0] * 4)] * 19], PLACES) == []
    assert find_stragglers([record([1.0] * 4, [0.001, 0.05, 0.001, 0.001])] * 20, PLACES) == []
