"""Checks that the collectives and messages of all ranks meet, from the programs of one rank of every kind.

Every rank of the world is given the program of its kind, and all advance in order, without times. A group works on one
call after the other, as NCCL's stream of a group does: a collective is done when all members have come to it, a batch
of messages when each has met its counterpart; messages outside of a batch have a stream for each pair. A rank goes on
after a call, and waits where its program does. This is stricter than a backend that takes messages by tag, so that what
passes here passes there.

Where members of a group bring different calls, or nobody can go on, the two ranks are shown side by side.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from shardwise.errors import ModelError
from shardwise.testing.trace.program import POINT_TO_POINT, SEND, Call, Entry, Partition, Wait

SHOWN = 4  # calls of a rank before the one where it stands
COLUMN = 76
UNEVEN = ("all_to_all", "all_gather")  # ranks may bring different sizes

# A partition's number, which of its parts, and of messages outside of a batch the pair of ranks.
Stream = tuple[int, int, int, int]


class Program(NamedTuple):
    """A kind's calls and waits, and the partitions that its calls name."""

    entries: Sequence[Entry]
    partitions: Sequence[Partition]


@dataclass
class Turn:
    """A call or a batch of messages of one rank, in the order of its stream."""

    rank: int
    calls: list[Call]
    stream: Stream
    left: int = 0  # messages that have not met theirs
    is_done: bool = False
    ready: float = 0.0  # for a replay in time: when it could begin on its rank, and when it is done
    done: float = 0.0


@dataclass
class RankState:
    number: int
    program: Program
    at: int = 0
    turns: dict[int, Turn] = field(default_factory=dict)  # by the number of a call
    queues: dict[Stream, deque[Turn]] = field(default_factory=lambda: defaultdict(deque))
    waits_for: Turn | None = None


def check_agreement(program_of: Callable[[int], Program], ranks: int, describe: Callable[[int], str] = str) -> int:
    """Return how many calls of all ranks have met.

    Args:
        program_of: the program of a rank, that of its kind.
        ranks: of the world.
        describe: names a rank.

    Raises:
        ModelError: some do not; with the lines of code of two ranks that are out of step.
    """
    world = RankWorld({number: program_of(number) for number in range(ranks)}, describe)
    world.run()
    return world.count


class RankWorld:
    """Ranks that advance, and what waits in their groups."""

    def __init__(self, ranks: Mapping[int, Program], describe: Callable[[int], str] = str) -> None:
        self.ranks = {number: RankState(number, program) for number, program in ranks.items()}
        self.describe, self.count = describe, 0
        self._partitions: list[dict[int, tuple[int, tuple[int, ...]]]] = []  # rank -> its part's number and members
        self._numbers: dict[int, list[int]] = {}  # of a program's partitions
        self._meetings: dict[Stream, list[Turn]] = {}  # the members of a group that have come to its next collective
        self._messages: dict[tuple[Stream, int, int, str], deque[tuple[Turn, Call]]] = defaultdict(deque)
        self._ready = deque(self.ranks.values())
        self._arriving: deque[Turn] = deque()  # those that have become the first of their rank in their stream
        self._number_partitions()

    def run(self) -> None:
        """Advance all ranks until nobody can. Raises ModelError if that is before their ends."""
        while self._ready:
            self._advance(self._ready.popleft())
        stuck = next((rank for rank in self.ranks.values() if self._pending(rank) is not None), None)
        if stuck is not None:
            raise ModelError(self._explain(stuck))

    def group(self, turn: Turn) -> tuple[int, ...]:
        """Return the ranks of a turn's group."""
        return self._partitions[turn.stream[0]][turn.rank][1]

    def members(self, turn: Turn) -> Sequence[int]:
        """Return those of its group that have to come to a turn."""
        return self.group(turn)

    def issued(self, rank: RankState, turn: Turn) -> None:
        """Take note that a rank has issued a call or the first of a batch."""

    def met(self, turns: Sequence[Turn], calls: Sequence[Call]) -> None:
        """Take note that a collective has all its members, or a message its counterpart; each turn's call is given."""
        self.count += len(turns)

    def _number_partitions(self) -> None:
        known: dict[Partition, int] = {}
        for program in {id(rank.program): rank.program for rank in self.ranks.values()}.values():
            for partition in program.partitions:
                if partition not in known:
                    known[partition] = len(self._partitions)
                    parts = enumerate(partition)
                    self._partitions.append({member: (index, part) for index, part in parts for member in part})
            self._numbers[id(program)] = [known[partition] for partition in program.partitions]

    # ---- advancing

    def _advance(self, rank: RankState) -> None:
        entries = rank.program.entries
        rank.waits_for = None
        while rank.at < len(entries):
            if not self.goes_on(rank, entries[rank.at]):
                return
            rank.at += 1

    def goes_on(self, rank: RankState, entry: Entry) -> bool:
        """Do what a rank does next; return whether it then goes on."""
        if isinstance(entry, Call):
            self._issue(rank, entry)
        elif isinstance(entry, Wait) and not rank.turns[entry.number].is_done:
            rank.waits_for = rank.turns[entry.number]
            return False
        return True

    def _issue(self, rank: RankState, call: Call) -> None:
        stream = self._stream(rank, call)
        queue = rank.queues[stream]
        last = queue[-1] if queue else None
        if last is not None and call.batch is not None and last.calls[0].batch == call.batch:
            last.calls.append(call)  # a batch is at the head of its queue only once it is whole
            rank.turns[call.number] = last
        else:
            rank.turns[call.number] = turn = Turn(rank.number, [call], stream)
            queue.append(turn)
            self.issued(rank, turn)
        if not self._continues(rank, call) and len(queue) == 1:
            self._arriving.append(queue[0])
        while self._arriving:
            self._arrive(self._arriving.popleft())

    def _continues(self, rank: RankState, call: Call) -> bool:
        """Return whether the batch of a message has more of them."""
        if call.batch is None:
            return False
        for at in range(rank.at + 1, len(rank.program.entries)):
            entry = rank.program.entries[at]
            if isinstance(entry, Call | Wait):
                return isinstance(entry, Call) and entry.batch == call.batch
        return False

    def _stream(self, rank: RankState, call: Call) -> Stream:
        number = self._numbers[id(rank.program)][call.partition]
        index, members = self._partitions[number][rank.number]
        if not call.is_message or call.batch is not None:
            return number, index, -1, -1
        pair = rank.number, self._peer(members, rank.number, call)
        return number, index, min(pair), max(pair)

    @staticmethod
    def _peer(members: tuple[int, ...], rank: int, call: Call) -> int:
        assert call.peer is not None  # every message has one
        return members[(members.index(rank) + call.peer) % len(members)]

    def _arrive(self, turn: Turn) -> None:
        """A turn is the first of its rank in its group."""
        if turn.calls[0].is_message:
            turn.left = len(turn.calls)
            for call in turn.calls:
                self._post(turn, call)
            return
        arrived = self._meetings.setdefault(turn.stream, [])
        arrived.append(turn)
        first = arrived[0]
        if _signature(first.calls[0]) != _signature(turn.calls[0]):
            raise ModelError(self._out_of_step(first, turn))
        if len(arrived) == len(self.members(turn)):
            del self._meetings[turn.stream]
            self.met(arrived, [one.calls[0] for one in arrived])
            for one in arrived:
                self._finish(one)

    def _post(self, turn: Turn, call: Call) -> None:
        """Bring a message to its counterpart, if that is there."""
        other = self._peer(self.group(turn), turn.rank, call)
        if other not in self.ranks:  # one that is not looked at
            self.met([turn], [call])
            self._settle(turn)
            return
        sends = call.operation == SEND
        source, target = (turn.rank, other) if sends else (other, turn.rank)
        own, counterpart = POINT_TO_POINT if sends else POINT_TO_POINT[::-1]
        waiting = self._messages[turn.stream, source, target, counterpart]
        if not waiting:
            self._messages[turn.stream, source, target, own].append((turn, call))
            return
        earlier, message = waiting.popleft()
        if message.bytes != call.bytes:
            raise ModelError(self._out_of_step(earlier, turn))
        self.met([earlier, turn], [message, call])
        self._settle(earlier)
        self._settle(turn)

    def _settle(self, turn: Turn) -> None:
        """One message of a turn has met its counterpart."""
        turn.left -= 1
        if turn.left == 0:
            self._finish(turn)

    def _finish(self, turn: Turn) -> None:
        turn.is_done = True
        rank = self.ranks[turn.rank]
        queue = rank.queues[turn.stream]
        queue.popleft()
        if rank.waits_for is turn:
            self._ready.append(rank)
        if queue:
            self._arriving.append(queue[0])

    # ---- what went wrong

    def _pending(self, rank: RankState) -> Turn | None:
        """Return the first turn of a rank that is not done: the one it waits behind, or one that it never waits for."""
        if rank.waits_for is not None:
            return rank.queues[rank.waits_for.stream][0]
        return next((queue[0] for queue in rank.queues.values() if queue), None)

    def _missing(self, turn: Turn) -> int:
        """Return a rank that a pending turn waits for."""
        members = self.members(turn)
        if not turn.calls[0].is_message:
            arrived = {other.rank for other in self._meetings[turn.stream]}
            return next(member for member in members if member not in arrived)
        for (stream, source, target, _), waiting in self._messages.items():
            if stream == turn.stream and any(other is turn for other, _ in waiting):
                return target if source == turn.rank else source
        raise AssertionError("a batch of messages waits for none of them")

    def _explain(self, stuck: RankState) -> str:
        """Follow who waits for whom, to a rank that has ended or to one that was met before."""
        passed: dict[int, Turn] = {}
        rank = stuck
        while rank.number not in passed and (turn := self._pending(rank)) is not None:
            passed[rank.number] = turn
            rank = self.ranks[self._missing(turn)]
        order = [*passed]
        if rank.number in passed:  # a circle
            circle = order[order.index(rank.number) :]
            names = ", which waits for ".join(f"rank {number}" for number in circle)
            one, two = self.ranks[circle[0]], self.ranks[circle[1 % len(circle)]]
            what = f"a circle of ranks: {names}, which waits for rank {circle[0]}"
        else:
            one, two = self.ranks[order[-1]], rank
            what = (
                f"rank {one.number} ({self.describe(one.number)}) waits for {passed[one.number].calls[0]}, which rank "
                f"{two.number} ({self.describe(two.number)}) never meets"
            )
        return f"{what}\n{self._columns(one, two)}"

    def _out_of_step(self, first: Turn, second: Turn) -> str:
        return (
            f"ranks {first.rank} and {second.rank} call different collectives or messages in one group, "
            f"{first.calls[0].group}\n"
            f"{self._columns(self.ranks[first.rank], self.ranks[second.rank], first, second)}"
        )

    def _columns(self, one: RankState, two: RankState, turn: Turn | None = None, other: Turn | None = None) -> str:
        left, right = self._lines(one, turn), self._lines(two, other)
        width = max(map(len, left))
        rows = zip_longest(left, right, fillvalue="")
        return "\n".join(f"  {left_line:{width}}  |  {right_line}".rstrip() for left_line, right_line in rows)

    def _lines(self, rank: RankState, turn: Turn | None) -> list[str]:
        """Return the last calls of a rank up to where it stands, each with its lines of code."""
        turn = turn or self._pending(rank)
        calls = [entry for entry in rank.program.entries if isinstance(entry, Call)]
        stands = len(calls) if turn is None else next(
            index for index, call in enumerate(calls) if call.number == turn.calls[0].number
        )  # fmt: skip
        lines = [f"rank {rank.number} ({self.describe(rank.number)})"]
        for index, call in enumerate(calls[max(0, stands - SHOWN) : stands + 1], max(0, stands - SHOWN)):
            mark = ">" if index == stands else " "
            lines += [_cut(f"{mark} {call}"), _cut(f"    {call.line}")]
        if turn is None:
            lines.append("> the end of the step")
        return lines


def _signature(call: Call) -> tuple[object, ...]:
    """Return what is equal on all members of a group."""
    return call.operation, call.unit, call.root, None if call.operation in UNEVEN else call.bytes


def _cut(text: str) -> str:
    return text if len(text) <= COLUMN else f"{text[: COLUMN - 1]}…"
