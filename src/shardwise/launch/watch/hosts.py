"""Positions of ranks on all hosts of a job: each launcher asks for them and answers through the launchers' store.

A number counts the requests. Every watcher looks at it, gathers its own ranks when it has grown, and answers under it;
host 0 puts the answers together. They are JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch.distributed as dist

from shardwise.launch.watch.position import RankPosition

REQUESTS, ANSWER = "shardwise/positions", "shardwise/positions/{}/{}"  # of a request, of a host
ANSWER_SECONDS = 6.0  # that other hosts have: to look, and to ask their ranks
LOOK_SECONDS = 0.1


class HostExchange:
    """The exchange of one host with the others.

    Args:
        store: of the launchers; None while they have not met.
        index, hosts: this host among all.
    """

    def __init__(self, store: Callable[[], dist.Store | None], index: int, hosts: int) -> None:
        self._store, self.index, self.hosts = store, index, hosts
        self._answered = 0

    def request(self) -> None:
        """Ask all hosts, this one too."""
        store = self._store()
        if store is not None:
            store.add(REQUESTS, 1)

    def pending(self) -> int:
        """Return the number of a request that this host has not answered; 0 for none."""
        store = self._store()
        newest = 0 if store is None else int(store.add(REQUESTS, 0))
        return newest if newest > self._answered else 0

    def answer(self, request: int, positions: Sequence[RankPosition]) -> None:
        """Answer a request with the positions of this host's ranks."""
        store = self._store()
        if store is not None:
            store.set(ANSWER.format(request, self.index), json.dumps([asdict(position) for position in positions]))
        self._answered = request

    def collect(self, request: int) -> tuple[list[RankPosition], list[int]]:
        """Return the positions of all hosts' ranks, and the hosts that have not answered in time."""
        store, end = self._store(), time.monotonic() + ANSWER_SECONDS
        missing = list(range(self.hosts))
        positions: list[RankPosition] = []
        while store is not None and missing and time.monotonic() < end:
            for host in list(missing):
                key = ANSWER.format(request, host)
                if store.check([key]):
                    positions += (_position(fields) for fields in json.loads(store.get(key)))
                    missing.remove(host)
            time.sleep(LOOK_SECONDS if missing else 0.0)
        return sorted(positions, key=lambda position: position.rank), missing


def _position(fields: dict[str, object]) -> RankPosition:
    return RankPosition(**{**fields, "stack": tuple(fields["stack"])})  # type: ignore[arg-type]
