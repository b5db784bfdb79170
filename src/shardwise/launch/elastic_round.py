"""Rounds of a run whose hosts come and go: who is there, and when those that are left begin anew.

A round is one meeting of hosts, whose ranks train until a host goes away, comes back or fails. Host 0 decides; it reads
each host's heartbeat, and what it decides is one record that all read. Nothing here talks to a network: the records and
their exchange are in elastic_hosts.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from shardwise.errors.exit_codes import MISTAKE
from shardwise.launch.hosts import JOIN_SECONDS
from shardwise.words import listed

PATIENCE = 10.0  # seconds without a heartbeat after which a host is gone
FIRST_CALL_SECONDS = 30.0  # for more than the fewest hosts to come to the first round
NO_SNAPSHOT = -1


@dataclass(frozen=True)
class HostOutcome:
    """The end of a round on one host: `failed`, `paused` or `done`; the others are of its error."""

    kind: str
    error: str = ""
    message: str = ""
    exit_code: int = 0


@dataclass(frozen=True)
class Heartbeat:
    """The words of one host, told again and again.

    Attributes:
        token: of this process; a host that was started anew has another.
        beat: a number that grows.
        round: the last round that it has taken part in; -1: none.
        outcome: of that round; None: its ranks run.
        is_leaving: it was told to stop.
        snapshots: steps whose state its memory holds.
    """

    token: str
    beat: int = 0
    round: int = -1
    outcome: HostOutcome | None = None
    is_leaving: bool = False
    snapshots: tuple[int, ...] = ()

    @property
    def is_waiting(self) -> bool:
        """True where it waits for a round."""
        has_ended = self.outcome is not None and self.outcome.kind != "done"
        return not self.is_leaving and (self.round < 0 or has_ended)


@dataclass(frozen=True)
class ElasticRound:
    """The record that all hosts follow.

    Attributes:
        number: grows from round to round.
        members: host -> token of the process that takes part; the first serves the store of the ranks.
        port: of that store.
        goes_on: ranks have trained before.
        reason: why there is a new round.
        snapshot: the step from whose state in memory it goes on, which some host has; -1: from a checkpoint.
        interrupted: why the members end their ranks; empty: they run.
        joins: why the ranks stop after a step with a checkpoint; empty: they run.
        final: the error that ends the run.
    """

    number: int
    members: dict[int, str]
    port: int = 0
    goes_on: bool = False
    reason: str = ""
    snapshot: int = NO_SNAPSHOT
    interrupted: str = ""
    joins: str = ""
    final: HostOutcome | None = None


@dataclass
class RoundKeeper:
    """Decides on host 0.

    Args:
        least, most: hosts of a round.
        max_restarts: rounds that may end in a fault although no host went away.
        serve: begins the store of a round's ranks and returns its port.
        join_seconds: for the fewest hosts to be there.
    """

    least: int
    most: int
    max_restarts: int
    serve: Callable[[], int]
    clock: Callable[[], float] = time.monotonic
    join_seconds: float = JOIN_SECONDS
    round: ElasticRound | None = None
    restarts: int = 0
    _known: dict[int, tuple[Heartbeat, float]] = field(default_factory=dict)  # by host, with when it last changed
    _since: float | None = None  # when there were hosts enough, or a round's first host had failed
    _waits: float | None = None  # since when there are too few
    _reason: str = ""

    def look(self, beats: Mapping[int, Heartbeat]) -> ElasticRound | None:
        """Return what all are to follow now, given what each host has said last; None before the first round."""
        now = self.clock()
        for host, beat in beats.items():
            if host not in self._known or self._known[host][0] != beat:
                self._known[host] = beat, now
        if self.round is None or self.round.final is not None:
            self._gather(now)
        elif any(self._runs(host) for host in self.round.members):
            self._supervise(now)
        else:
            self._conclude(now)
        return self.round

    def _is_alive(self, host: int) -> bool:
        beat, when = self._known.get(host, (None, 0.0))
        return beat is not None and not beat.is_leaving and self.clock() - when < PATIENCE

    def _outcome(self, host: int) -> HostOutcome | None:
        """Return how the round has ended on a member; None where it has not, or has not said so."""
        assert self.round is not None
        beat = self._known[host][0]
        is_of_round = beat.token == self.round.members[host] and beat.round == self.round.number
        return beat.outcome if is_of_round else None

    def _is_gone(self, host: int) -> bool:
        """Return whether a member went away before its ranks were done: it is silent, leaves, or is another process."""
        assert self.round is not None
        outcome = self._outcome(host)
        if outcome is not None and outcome.kind == "done":
            return False
        return not self._is_alive(host) or self._known[host][0].token != self.round.members[host]

    def _runs(self, host: int) -> bool:
        return self._outcome(host) is None and not self._is_gone(host)

    def _supervise(self, now: float) -> None:
        """End a round on all hosts where it has ended on one; let hosts that wait join."""
        assert self.round is not None
        outcomes = {host: self._outcome(host) for host in self.round.members}
        failed = [host for host, outcome in outcomes.items() if outcome is not None and outcome.kind == "failed"]
        gone = [host for host in self.round.members if self._is_gone(host)]
        if (failed or gone) and not self.round.interrupted:
            why = _gone(gone) if gone else f"host {failed[0]} has failed"
            self.round = replace(self.round, interrupted=why)
        waiting = [host for host in self._waiting() if host not in self.round.members]
        if waiting and not self.round.joins and not any(outcomes.values()):
            self.round = replace(self.round, joins=_join(waiting))

    def _conclude(self, now: float) -> None:
        """Judge a round that has ended on all hosts, once it is known whether one of them is gone."""
        assert self.round is not None
        members = self.round.members
        gone = [host for host in members if self._is_gone(host)]
        outcomes = [outcome for host in members if (outcome := self._outcome(host)) is not None]
        failures = [outcome for outcome in outcomes if outcome.kind == "failed"]
        if all(outcome.kind == "done" for outcome in outcomes) and not gone:
            return
        if failures and not gone:
            self._since = now if self._since is None else self._since
            if now - self._since < PATIENCE:
                return  # a host that was lost has failed the others, and is silent soon
            if not self._may_restart(failures):
                return
            first = failures[0]
            self._reason = (first.message.strip().splitlines() or [first.error])[-1]
        elif gone:
            self._reason = _gone(gone)
        else:
            self._reason = self.round.joins or self._reason
        self._gather(now)

    def _may_restart(self, failures: list[HostOutcome]) -> bool:
        """Count a restart, or end the run with the first failure."""
        assert self.round is not None
        if self.restarts < self.max_restarts and failures[0].exit_code != MISTAKE:
            self.restarts += 1
            self._since = None
            return True
        self.round = replace(self.round, final=failures[0])
        return False

    def _waiting(self) -> list[int]:
        return sorted(host for host in self._known if self._is_alive(host) and self._known[host][0].is_waiting)

    def _gather(self, now: float) -> None:
        """Begin a round where hosts enough wait for one."""
        if self.round is not None and self.round.final is not None:
            return
        waiting = self._waiting()
        if len(waiting) < self.least:
            self._since = None
            self._waits = now if self._waits is None else self._waits
            if now - self._waits > self.join_seconds:
                self._give_up(waiting)
            return
        self._since = now if self._since is None else self._since
        is_first = self.round is None
        if is_first and len(waiting) < self.most and now - self._since < FIRST_CALL_SECONDS:
            return
        self._begin(waiting)

    def _begin(self, hosts: list[int]) -> None:
        beats = {host: self._known[host][0] for host in hosts}
        before = max(beat.round for beat in beats.values())
        number = max(before, -1 if self.round is None else self.round.number) + 1
        kept = [step for beat in beats.values() if beat.round == before for step in beat.snapshots]
        self.round = ElasticRound(
            number=number,
            members={host: beat.token for host, beat in beats.items()},
            port=self.serve(),
            goes_on=number > 0,
            reason=self._reason,
            snapshot=max(kept, default=NO_SNAPSHOT),
        )
        self._since, self._waits, self._reason = None, None, ""

    def _give_up(self, waiting: list[int]) -> None:
        message = (
            f"{len(waiting)} of the at least {self.least} hosts that PET_NNODES asks for are there after "
            f"{self.join_seconds:.0f} s; start the others, or allow fewer"
        )
        ended = ElasticRound(0, {}) if self.round is None else self.round
        self.round = replace(ended, final=HostOutcome("failed", "MachineError", message, MISTAKE))


def _gone(hosts: list[int]) -> str:
    return f"{_named(hosts)} {'is' if len(hosts) == 1 else 'are'} gone"


def _join(hosts: list[int]) -> str:
    return f"{_named(hosts)} {'joins' if len(hosts) == 1 else 'join'}"


def _named(hosts: list[int]) -> str:
    return f"host{'s' * (len(hosts) > 1)} {listed(map(str, hosts))}"
