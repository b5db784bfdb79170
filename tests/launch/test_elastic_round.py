"""Which hosts make the next round of an elastic run, and when: decided by their heartbeats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors.exit_codes import FAULT, MISTAKE
from shardwise.launch.elastic_round import (
    FIRST_CALL_SECONDS,
    PATIENCE,
    ElasticRound,
    Heartbeat,
    HostOutcome,
    RoundKeeper,
)

FAILED, PAUSED, DONE = HostOutcome("failed", "WorkerError", "lost", FAULT), HostOutcome("paused"), HostOutcome("done")


class Hosts:
    """Hosts whose time passes when they are told to."""

    def __init__(self, least: int = 1, most: int = 3, max_restarts: int = 0) -> None:
        self.now = 0.0
        self.beats: dict[int, Heartbeat] = {}
        self.ports = iter(range(100, 200))
        self.keeper = RoundKeeper(least, most, max_restarts, lambda: next(self.ports), lambda: self.now)

    def come(self, *hosts: int, token: str = "first") -> None:
        for host in hosts:
            self.beats[host] = Heartbeat(f"{token} {host}")

    def say(self, host: int, **changes: Any) -> None:
        self.beats[host] = replace(self.beats[host], **changes)

    def take_part(self) -> None:
        """Let those that are named in the round take part in it."""
        assert self.keeper.round is not None
        for host in self.keeper.round.members:
            self.say(host, round=self.keeper.round.number, outcome=None)

    def pass_time(self, seconds: float, silent: tuple[int, ...] = ()) -> ElasticRound | None:
        """Return what is decided after so many seconds, in which all but some have been heard of."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for host in self.beats.keys() - set(silent):
                self.say(host, beat=self.beats[host].beat + 1)
            decided = self.keeper.look(self.beats)
        return decided


def started(**settings: int) -> tuple[Hosts, ElasticRound]:
    hosts = Hosts(**settings)
    hosts.come(0, 1, 2)
    first = hosts.pass_time(0.5)
    assert first is not None and [*first.members] == [0, 1, 2] and not first.goes_on
    hosts.take_part()
    return hosts, first


def test_the_first_round_waits_for_more_hosts_a_while() -> None:
    hosts = Hosts(least=2)
    hosts.come(0, 2)
    assert hosts.pass_time(FIRST_CALL_SECONDS) is None
    first = hosts.pass_time(1)
    assert first is not None and [*first.members] == [0, 2]


def test_a_silent_host_is_gone_and_the_others_go_on() -> None:
    hosts, first = started()
    hosts.say(0, outcome=FAILED)  # its ranks have lost a peer
    over = hosts.pass_time(1, silent=(2,))
    assert over is not None and over.interrupted == "host 0 has failed" and over.number == first.number
    hosts.say(1, outcome=FAILED)
    assert hosts.pass_time(PATIENCE - 2, silent=(2,)) == over
    second = hosts.pass_time(2, silent=(2,))
    assert second is not None and [*second.members] == [0, 1]
    assert (second.goes_on, second.reason, second.number) == (True, "host 2 is gone", 1)


def test_a_host_that_vanishes_interrupts_ranks_that_wait_for_it() -> None:
    hosts, _ = started()
    over = hosts.pass_time(PATIENCE + 0.5, silent=(1,))
    assert over is not None and over.interrupted == "host 1 is gone"


def test_an_error_without_a_message_is_a_reason_too() -> None:
    hosts, _ = started(max_restarts=1)
    for host in range(3):
        hosts.say(host, outcome=HostOutcome("failed", "MemoryError", "", FAULT))
    second = hosts.pass_time(PATIENCE + 1)
    assert second is not None and (second.number, second.reason) == (1, "MemoryError")


def test_a_host_that_was_started_anew_is_another() -> None:
    hosts, _ = started()
    hosts.come(2, token="second")
    hosts.say(0, outcome=FAILED)
    hosts.say(1, outcome=FAILED)
    second = hosts.pass_time(0.5)
    assert second is not None and second.members[2] == "second 2" and second.reason == "host 2 is gone"


def test_a_host_that_comes_back_joins_at_a_pause() -> None:
    hosts, _ = started()
    del hosts.beats[2]
    hosts.keeper._known.pop(2)
    hosts.keeper.round = replace(hosts.keeper.round, members={0: "first 0", 1: "first 1"})  # type: ignore[type-var]
    hosts.come(2, token="second")
    asked = hosts.pass_time(0.5)
    assert asked is not None and asked.joins == "host 2 joins" and not asked.interrupted
    hosts.say(0, outcome=PAUSED)
    assert hosts.pass_time(0.5) == asked
    hosts.say(1, outcome=PAUSED)
    second = hosts.pass_time(0.5)
    assert second is not None and [*second.members] == [0, 1, 2] and second.reason == "host 2 joins"


@pytest.mark.parametrize(("exit_code", "restarts"), [(FAULT, 1), (FAULT, 0), (MISTAKE, 1)])
def test_a_fault_without_a_lost_host_counts_as_a_restart(exit_code: int, restarts: int) -> None:
    hosts, _ = started(max_restarts=restarts)
    for host in range(3):
        hosts.say(host, outcome=replace(FAILED, exit_code=exit_code))
    decided = hosts.pass_time(PATIENCE + 1)
    assert decided is not None
    if exit_code == FAULT and restarts:
        assert decided.number == 1 and decided.reason == "lost" and decided.final is None
        hosts.take_part()
        for host in range(3):
            hosts.say(host, outcome=FAILED)
        decided = hosts.pass_time(PATIENCE + 1)
    assert decided is not None and decided.final is not None and decided.final.message == "lost"


def test_a_host_that_was_told_to_stop_is_not_waited_for() -> None:
    hosts, _ = started()
    hosts.say(1, outcome=PAUSED, is_leaving=True)
    hosts.say(0, outcome=PAUSED)
    hosts.say(2, outcome=PAUSED)
    second = hosts.pass_time(0.5)
    assert second is not None and [*second.members] == [0, 2] and second.reason == "host 1 is gone"


def test_too_few_hosts_are_waited_for_and_then_given_up() -> None:
    hosts, _ = started(least=2)
    hosts.say(0, outcome=FAILED)
    decided = hosts.pass_time(hosts.keeper.join_seconds, silent=(1, 2))
    assert decided is not None and decided.final is None
    decided = hosts.pass_time(PATIENCE + 2, silent=(1, 2))
    assert decided is not None and decided.final is not None and "1 of the at least 2 hosts" in decided.final.message


def test_a_new_host_0_goes_on_where_the_others_have_come_to() -> None:
    hosts = Hosts()
    hosts.come(0, 1, 2)
    hosts.say(1, round=4, outcome=FAILED, snapshots=(7, 8))
    hosts.say(2, round=4, outcome=FAILED, snapshots=(8, 9))
    first = hosts.pass_time(0.5)
    assert first is not None and (first.number, first.goes_on, first.snapshot) == (5, True, 9)


def test_the_newest_step_in_memory_is_gone_on_from() -> None:
    hosts, _ = started()
    hosts.say(0, outcome=FAILED, snapshots=(7, 8))
    hosts.say(1, outcome=FAILED, snapshots=(8, 9))
    second = hosts.pass_time(PATIENCE + 0.5, silent=(2,))
    assert second is not None and second.snapshot == 9


def test_memory_of_an_earlier_round_does_not_count() -> None:
    """A host that was cut off may hold steps that the others have done again."""
    hosts = Hosts()
    hosts.come(0, 1, 2)
    hosts.say(1, round=4, outcome=FAILED, snapshots=(7, 8))
    hosts.say(2, round=3, outcome=FAILED, snapshots=(10, 11))
    first = hosts.pass_time(0.5)
    assert first is not None and first.snapshot == 8


def test_hosts_that_are_done_are_left_alone() -> None:
    hosts, first = started()
    for host in range(3):
        hosts.say(host, outcome=DONE)
    assert hosts.pass_time(2 * PATIENCE, silent=(1, 2)) == first
