"""Ranks whose calls meet pass, however they are mixed; of others the two that are out of step are named."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from shardwise.errors import ModelError
from shardwise.testing.trace.agreement import Program, check_agreement
from shardwise.testing.trace.program import RECEIVE, SEND, Call, Entry, Wait

WORLD = ((0, 1, 2, 3),)
ROWS = ((0, 1), (2, 3))
COLUMNS = ((0, 2), (1, 3))
PARTITIONS = (WORLD, ROWS, COLUMNS)
NAMES = ("world", "tensor", "pipeline")


def program(*calls: Any, waits: bool = True) -> Program:
    """The program of calls: (number of a partition, operation, more)."""
    entries: list[Entry] = []
    for number, (partition, operation, more) in enumerate(calls):
        line = f"model.py:{10 + number}"
        entries.append(Call(number, operation, NAMES[partition], partition, 8, "", "", line, **more))
        if waits and "batch" not in more:
            entries.append(Wait(number))
    entries += [Wait(number) for number, (_, _, more) in enumerate(calls) if "batch" in more]
    return Program(entries, PARTITIONS)


def reduce(partition: int, **more: Any) -> tuple[int, str, dict[str, Any]]:
    return partition, "all_reduce", more


def message(operation: str, peer: int = 1, **more: Any) -> tuple[int, str, dict[str, Any]]:
    return 2, operation, {"peer": peer, **more}


def check(*programs: Program) -> int:
    return check_agreement(lambda rank: programs[rank], 4, lambda rank: f"place {rank}")


def test_calls_that_meet_are_counted() -> None:
    one = program(reduce(0), reduce(1), reduce(2), reduce(0))
    assert check(one, one, one, one) == 16


def test_a_collective_that_one_stage_alone_issues_is_found() -> None:
    first, second = program(reduce(1), reduce(0)), program(reduce(1))
    with pytest.raises(ModelError, match=r"rank 0 \(place 0\) waits for all_reduce over world, .*rank 2") as error:
        check(first, first, second, second)
    left, right = str(error.value).splitlines()[-1].split("|")
    assert "model.py:11" in left and not right.strip()
    assert "> the end of the step" in str(error.value)


def test_groups_that_are_entered_in_opposite_order_are_a_circle() -> None:
    first, second = program(reduce(1), reduce(2)), program(reduce(2), reduce(1))
    with pytest.raises(ModelError, match=r"a circle of ranks: rank \d, which waits for rank \d, which"):
        check(first, second, second, first)
    ahead = [program(*(reduce(number) for number in order), waits=False) for order in ((1, 2), (2, 1))]
    assert check(ahead[0], ahead[1], ahead[1], ahead[0]) == 8  # each group has a stream of its own


def test_different_calls_in_one_group_are_shown_side_by_side() -> None:
    first, second = program(reduce(0), reduce(1)), program(reduce(0), (1, "all_gather", {}))
    with pytest.raises(ModelError, match=r"ranks 0 and 1 call different .* in one group, tensor") as error:
        check(first, second, first, second)
    line = next(line for line in str(error.value).splitlines() if line.count("> all_") == 2)
    assert "all_reduce" in line.partition("|")[0] and "all_gather" in line.partition("|")[2]


def test_a_send_without_a_receive_is_found() -> None:
    sends, receives, neither = program(message(SEND)), program(message(RECEIVE)), program()
    assert check(sends, sends, receives, receives) == 4
    with pytest.raises(ModelError, match=r"rank 1 .* waits for send over pipeline, .* which rank 3 .* never meets"):
        check(sends, sends, receives, neither)
    with pytest.raises(ModelError, match=r"rank 1 .* waits for send"):  # nobody waits for it, and it is lost
        check(sends, program(message(SEND), waits=False), receives, neither)


def test_messages_that_cross_need_a_batch() -> None:
    one_by_one = program(message(SEND), message(RECEIVE))
    with pytest.raises(ModelError, match="a circle of ranks"):
        check(one_by_one, one_by_one, one_by_one, one_by_one)
    at_once = program(message(SEND, batch=1), message(RECEIVE, batch=1))
    assert check(at_once, at_once, at_once, at_once) == 8


def drawn(seed: int) -> tuple[list[list[Any]], random.Random]:
    """Calls of four ranks that meet: collectives and exchanges of random groups in one order of all."""
    draw = random.Random(seed)
    calls: list[list[Any]] = [[] for _ in range(4)]
    for batch in range(20):
        partition = draw.randrange(3)
        members = draw.choice(PARTITIONS[partition])
        exchange = partition == 2 and draw.random() < 0.5
        for rank in members:
            if exchange:
                calls[rank] += [message(SEND, batch=batch), message(RECEIVE, batch=batch)]
            else:
                calls[rank].append(reduce(partition))
    return calls, draw


def programs_of(calls: Sequence[Sequence[Any]], draw: random.Random) -> list[Program]:
    return [program(*own, waits=draw.random() < 0.5) for own in calls]


@pytest.mark.parametrize("seed", range(40))
def test_drawn_programs_pass_until_a_call_is_lost(seed: int) -> None:
    calls, draw = drawn(seed)
    assert check(*programs_of(calls, draw)) == sum(map(len, calls))
    rank = draw.choice([rank for rank, own in enumerate(calls) if own])
    del calls[rank][draw.randrange(len(calls[rank]))]
    with pytest.raises(ModelError, match=r"\|"):
        check(*programs_of(calls, draw))
