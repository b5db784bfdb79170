"""Notes of ranks that wait for each other: a message that can never be answered ends as an error.

Without them it would end at the group's timeout.

Before a rank waits it notes in the job's store for what. A rank that waits for another one reads that one's note. If
the other waits for this rank too, in a call that does not fit the one that this rank is in, neither will ever go on.
Both count what they have exchanged, so that a note which is out of date is known as such. The objects themselves do not
go through the store.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch_compat.groups import default_store
from shardwise.smp.exceptions import MessageError

LONGEST = 600.0  # seconds, as long as torch's own calls wait for a peer
PAUSES = (0.0005, 0.02)  # seconds between looks: at first, and at most
SEND, RECEIVE, LEFT = "smp.send or smp.broadcast", "smp.recv_from", "left"


class WaitRegistry:
    """This rank's notes and counters. Made by all ranks together."""

    def __init__(self, rank: int) -> None:
        name = torch.tensor([secrets.randbits(62)])  # not a number of the script's own sequence
        dist.broadcast(name, 0)  # an earlier `smp.init` has left notes in the same store
        self.store, self.rank, self.prefix = default_store(), rank, f"shardwise/smp/{int(name)}"
        self.done: Counter[tuple[str, int]] = Counter()  # (SEND or RECEIVE, peer) -> messages
        self.entered: Counter[str] = Counter()  # ranks of a group -> its barriers and gathers
        self.inside: dict[str, str] = {}  # ranks of a group -> the call in which this rank is with them
        self.assembled: Counter[str] = Counter()  # call and ranks of its group -> times

    def message(self, call: str, peers: Sequence[int], exchange: Callable[[int], None]) -> None:
        """`exchange(peer)` with each of `peers`, once it is at the same message.

        Raises:
            MessageError: a peer waits for something else, has ended, or did not come in time.
        """
        numbers = {peer: self.done[call, peer] + 1 for peer in peers}
        with self._noted({"call": call, "of": {str(peer): number for peer, number in numbers.items()}}):
            for peer in peers:
                self.store.add(self._key(call, self.rank, peer), 1)
            for peer in peers:
                self._await(call, peer, numbers[peer])
                exchange(peer)
        self.done.update((call, peer) for peer in peers)

    @contextmanager
    def together(self, call: str, ranks: Sequence[int]) -> Iterator[None]:
        """Around a call that waits for all of `ranks`."""
        group = json.dumps(list(ranks))
        self.entered[group] += 1
        self.inside[group] = call
        with self._noted({"call": call, "group": group, "number": self.entered[group]}):
            yield
        del self.inside[group]

    def assemble(self, call: str, ranks: Sequence[int]) -> None:
        """Return when all of `ranks` are in `call`, which needs what each of them holds.

        Raises:
            MessageError: one of them waits for this rank elsewhere, has ended, or did not come in time.
        """
        key = f"{self.prefix}/{call}/{json.dumps(list(ranks))}"
        self.assembled[key] += 1

        def is_met() -> bool:
            return self.store.add(key, 0) >= self.assembled[key] * len(ranks)

        with self.together(call, ranks):
            self.store.add(key, 1)
            others = [rank for rank in ranks if rank != self.rank]
            self._wait(is_met, call, others, f"all of ranks {list(ranks)} have to call it")

    def leave(self) -> None:
        """Note that this rank will wait for nobody any more."""
        with suppress(RuntimeError, dist.DistError):  # rank 0 keeps the store, and may have ended before
            self.store.set(f"{self.prefix}/{self.rank}", json.dumps({"call": LEFT}))

    @contextmanager
    def _noted(self, note: dict[str, Any]) -> Iterator[None]:
        self.store.set(f"{self.prefix}/{self.rank}", json.dumps(note))
        yield  # after an error the note stays, so that the peer finds it too
        self.store.set(f"{self.prefix}/{self.rank}", "{}")

    def _key(self, call: str, one: int, other: int) -> str:
        return f"{self.prefix}/{call}/{one}/{other}"

    def _await(self, call: str, peer: int, number: int) -> None:
        key = self._key(RECEIVE if call == SEND else SEND, peer, self.rank)
        self._wait(lambda: self.store.add(key, 0) >= number, call, [peer], "neither can go on")

    def _wait(self, is_met: Callable[[], bool], call: str, peers: Sequence[int], consequence: str) -> None:
        start, pause = time.monotonic(), PAUSES[0]
        while not is_met():
            for peer in peers:
                if (hindrance := self._hindrance(call, peer)) and not is_met():  # a peer that was met has gone on since
                    raise MessageError(
                        f"rank {self.rank} is in {call} with rank {peer}, which {hindrance}; {consequence}"
                    )
            if time.monotonic() - start > LONGEST:
                raise MessageError(f"rank {self.rank} is in {call}, and not all of {list(peers)} came in {LONGEST:g} s")
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    def _hindrance(self, call: str, peer: int) -> str:
        """Why `peer` will never be where this rank is, as far as its note says."""
        key = f"{self.prefix}/{peer}"
        note = json.loads(self.store.get(key)) if self.store.check([key]) else {}
        their_call = note.get("call")
        if their_call == LEFT:
            return "has ended"
        # Both send, or both receive, or this rank does neither; done means here the other half of the peer's message.
        if their_call in (SEND, RECEIVE) and (their_call == call or call not in (SEND, RECEIVE)):
            half = RECEIVE if their_call == SEND else SEND
            number = note["of"].get(str(self.rank), 0)
            return (
                f"is in {their_call} with this rank" + " too" * (their_call == call)
                if number > self.done[half, peer]
                else ""
            )
        group = note.get("group")
        if group is None or self.rank not in json.loads(group):
            return ""
        # A call of all of a group's ranks is met by the same call of the same number alone.
        other = their_call != call and call == self.inside.get(group) and note["number"] == self.entered[group]
        return f"waits for this rank in {their_call}" if other or note["number"] > self.entered[group] else ""
