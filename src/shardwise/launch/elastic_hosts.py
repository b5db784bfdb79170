"""Hosts that come and go: each launcher's part in the rounds of a run (`PET_NNODES=1:3`).

Host 0 serves a store at the address that the scheduler gave. A thread of each launcher writes its heartbeat there and
reads the round that all follow; host 0's thread decides on it (elastic_round.py). Records are JSON. Where host 0 itself
goes away the others wait for it, and tell it which round they have come to.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler

from shardwise.errors import MachineError, ShardwiseError, WorkerError
from shardwise.errors.exit_codes import FAULT
from shardwise.launch.elastic_round import (
    PATIENCE,
    ElasticRound,
    Heartbeat,
    HostOutcome,
    RoundKeeper,
)
from shardwise.launch.hosts import HostEnvironment
from shardwise.launch.interrupt import asked_by_signal
from shardwise.launch.reach import reach
from shardwise.launch.rendezvous import HostRendezvous, error_named, rendezvous_of
from shardwise.launch.said_wait import SaidWait

LOOK_SECONDS = 0.25
HEARTBEAT, ROUND = "elastic/host/{}", "elastic/round"
ROUND_TIMEOUT = timedelta(minutes=2)  # of launchers that begin a round: one may go away meanwhile
LAST_LOOK_SECONDS = 1.5  # for which host 0 keeps the store at the end, so that others read of it
ENDED, PAUSED = HostOutcome("done"), HostOutcome("paused")
NEW_ROUND = "a new round: "  # what a request to stop begins with


def is_pause(stopped: str | None) -> bool:
    """Return whether ranks have stopped for a round with other hosts: one has joined, or another was told to stop."""
    return stopped is not None and (asked_by_signal(stopped) or stopped.startswith(NEW_ROUND))


def failed_outcome(error: Exception) -> HostOutcome:
    """Return the outcome of a round that an error has ended."""
    exit_code = error.exit_code if isinstance(error, ShardwiseError) else FAULT
    return HostOutcome("failed", type(error).__name__, str(error), exit_code)


class ElasticHosts:
    """The launcher of one host among those that come and go; a context manager.

    Args:
        host: this one, and how many there may be.
        max_restarts: rounds that may end in a fault although no host went away.

    Attributes:
        request_file: into which is written why ranks are to stop after a step.
        first_round: the number of the first in which this process takes part.
    """

    def __init__(self, host: HostEnvironment, max_restarts: int) -> None:
        assert host.least_hosts is not None
        self.host = host
        self.ranks_store: dist.TCPStore | None = None  # of the round's ranks, on host 0
        self.first_round = -1
        self._own = Heartbeat(uuid.uuid4().hex)
        self._round: ElasticRound | None = None
        self._heard = time.monotonic()
        self._store: dist.Store | None = None
        self._keeper = RoundKeeper(
            host.least_hosts, host.hosts, max_restarts, self._serve_ranks, join_seconds=host.join_seconds
        )
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._talk, name="shardwise-hosts", daemon=True)
        self._directory = tempfile.TemporaryDirectory(prefix="shardwise-hosts-")
        self.request_file = Path(self._directory.name) / "request"

    def __enter__(self) -> ElasticHosts:
        if self.host.index == 0:
            try:
                self._store = self._connect()
            except (dist.DistError, RuntimeError) as error:
                why = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise MachineError(
                    f"host 0 cannot be met at {self.host.master_address}:{self.host.master_port} (from "
                    f"{self.host.launcher}): {why}; check that the address is this host's and that the port is free"
                ) from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell(is_leaving=True)
        if self.host.index == 0:
            time.sleep(LAST_LOOK_SECONDS)
        else:
            time.sleep(2 * LOOK_SECONDS)
        self._ended.set()
        self._thread.join(2.0)  # a store that does not answer holds it
        self._store = self.ranks_store = None
        self._directory.cleanup()

    # ---- for the run

    def next_round(self) -> ElasticRound:
        """Wait for a round in which this host takes part.

        Raises:
            ShardwiseError: the run has failed; as the host that failed ends with.
            WorkerError: host 0 is not there, or does not come back.
        """
        wait = SaidWait(self.host)
        while True:
            current = self._round
            if current is not None and current.final is not None:
                raise self._error(current.final)
            if current is not None and current.number > self._own.round and self._takes_part(current):
                self.request_file.unlink(missing_ok=True)
                self.first_round = current.number if self._own.round < 0 else self.first_round
                self._tell(round=current.number, outcome=None)
                return current
            host = self.host
            if time.monotonic() - self._heard > host.join_seconds:
                raise WorkerError(
                    f"host 0 does not answer at {host.master_address}:{host.master_port} (from {host.launcher}); check "
                    "that it runs, and that hosts reach each other"
                )
            wait.say(self._missing())
            time.sleep(LOOK_SECONDS / 2)

    def place_in(self, current: ElasticRound) -> HostEnvironment:
        """Return this host's place among the members of a round."""
        members = list(current.members)
        return replace(
            self.host,
            index=members.index(self.host.index),
            hosts=len(members),
            master_port=current.port,
            least_hosts=None,
            join_seconds=ROUND_TIMEOUT.total_seconds(),
        )

    def rendezvous(self, current: ElasticRound) -> RendezvousHandler:
        """Return how the ranks of a round meet."""
        place = self.place_in(current)
        return rendezvous_of(place) if place.hosts == 1 else RoundRendezvous(place, self)

    def report(self, outcome: HostOutcome, **more: Any) -> None:
        """Tell how the round has ended here."""
        self._tell(outcome=outcome, **more)

    @property
    def interruption(self) -> str:
        """Why the ranks of this host are to end now; empty: they are not."""
        current, number = self._round, self._own.round
        if time.monotonic() - self._heard > PATIENCE:
            return "host 0 does not answer"
        if current is None or number < 0:
            return ""
        if current.number > number or not self._takes_part(current):
            return "the others have gone on without this host"
        return current.interrupted if current.final is None else current.final.message

    def _missing(self) -> str:
        """Return for whom this host waits before a round."""
        host = self.host
        if time.monotonic() - self._heard > PATIENCE:
            return f"host 0, which does not answer at {host.master_address}:{host.master_port}"
        return f"hosts to begin with, {host.least_hosts} of {host.hosts} at least"

    # ---- the thread

    def _talk(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            try:
                if self._store is None:
                    self._store = self._connect()
                self._exchange(self._store)
            except (dist.DistError, RuntimeError, OSError):
                self._store = None  # host 0 is gone, or not there yet

    def _connect(self) -> dist.Store | None:
        host = self.host
        if host.index and reach(host.master_address, host.master_port, LOOK_SECONDS) is not None:
            return None
        return dist.TCPStore(
            host.master_address,
            host.master_port,
            is_master=host.index == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE),
        )

    def _exchange(self, store: dist.Store | None) -> None:
        """Say that this host is there, and read what all are to follow."""
        if store is None:
            return
        own = self._tell(beat=self._own.beat + 1)
        store.set(HEARTBEAT.format(self.host.index), json.dumps(asdict(own)))
        if self.host.index == 0:
            self._decide(store)
        elif store.check([ROUND]):
            self._round = _round_of(json.loads(store.get(ROUND)))
        self._heard = time.monotonic()
        current = self._round
        if current is not None and current.joins and current.number == own.round and own.outcome is None:
            self._request_stop(current.joins)

    def _decide(self, store: dist.Store) -> None:
        keys = {host: HEARTBEAT.format(host) for host in range(self.host.hosts)}
        beats = {host: _heartbeat_of(json.loads(store.get(key))) for host, key in keys.items() if store.check([key])}
        current = self._keeper.look(beats)
        if current is not None and current != self._round:
            store.set(ROUND, json.dumps(asdict(current)))
            self._round = current

    def _serve_ranks(self) -> int:
        address = self.host.master_address
        self.ranks_store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=ROUND_TIMEOUT)
        return self.ranks_store.port

    def _request_stop(self, reason: str) -> None:
        if not self.request_file.exists():
            partial = self.request_file.with_suffix(".partial")
            partial.write_text(NEW_ROUND + reason, encoding="utf-8")
            partial.replace(self.request_file)

    def _tell(self, **changes: Any) -> Heartbeat:
        with self._lock:
            self._own = replace(self._own, **changes)
            return self._own

    def _takes_part(self, current: ElasticRound) -> bool:
        return current.members.get(self.host.index) == self._own.token

    def _error(self, final: HostOutcome) -> ShardwiseError:
        return error_named(final.error, final.message, final.exit_code)


class RoundRendezvous(HostRendezvous):
    """The hosts of one round, which may be interrupted."""

    of_absent_host = WorkerError  # no mistake of the user: it was there when the round began

    def __init__(self, host: HostEnvironment, hosts: ElasticHosts) -> None:
        super().__init__(host)
        self._elastic = hosts

    def raise_others_failure(self) -> None:
        """Raise the error of another host that has failed, or why the round is over.

        Raises:
            ShardwiseError: as that host ends with.
        """
        if self._elastic.interruption:
            raise WorkerError(self._elastic.interruption)
        super().raise_others_failure()

    def _meet(self, wait: SaidWait) -> dist.Store:
        host, own = self.host, self._elastic.ranks_store
        if host.index == 0 and own is not None:
            return own
        obstacle = reach(host.master_address, host.master_port, PATIENCE)
        if obstacle is not None:
            raise self._cannot_meet(obstacle)
        return dist.TCPStore(host.master_address, host.master_port, is_master=False, timeout=ROUND_TIMEOUT)


def _round_of(fields: Mapping[str, Any]) -> ElasticRound:
    members = {int(host): token for host, token in fields["members"].items()}
    final = None if fields["final"] is None else HostOutcome(**fields["final"])
    return ElasticRound(**{**fields, "members": members, "final": final})


def _heartbeat_of(fields: Mapping[str, Any]) -> Heartbeat:
    outcome = None if fields["outcome"] is None else HostOutcome(**fields["outcome"])
    return Heartbeat(**{**fields, "outcome": outcome, "snapshots": tuple(fields["snapshots"])})
