"""The traced ranks replayed in time: a host, a stream of computation and one for each group, as torch has them on CUDA.

One rank of each stage is replayed; those beside it do the same at the same time. A host launches ahead and waits where
a value is read. A collective begins when computation has come to it and its stream is free. What FSDP2 gathers begins
when the unit before is in use, and is waited for where it is used; what it reduces is waited for at the end of the last
backward, and by the next reduction. Copies between accelerator and host have streams of their own, as the code asks for
them, and updates in host memory take the host's time, or a thread's. Computation and FSDP2's collectives beside it slow
each other down as the planner's formulas say (`communication.overlapped_seconds`), from one gathered unit to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.testing.trace.agreement import Program, RankState, RankWorld, Stream, Turn
from shardwise.testing.trace.program import (
    HOST_WAITS,
    THREAD_WAITS,
    Call,
    Copy,
    CopyWait,
    Entry,
    HostWork,
    Joined,
    Operators,
    Read,
    Wait,
)
from shardwise.testing.trace.recorder import BACKWARD, UPDATE
from shardwise.testing.trace.roofline import Roofline

COMPUTATION, HOST, THREAD, COPIES = "computation", "host", "thread of the host", "copies"


class TimelineSlice(NamedTuple):
    """One thing that a stream of a rank did, in seconds from the start."""

    rank: int
    stream: str
    name: str
    start: float
    seconds: float
    entry: Operators | Call | None = None


class Worked(NamedTuple):
    """Seconds of a rank's microbatches, by the end of what they compute; what comes behind is done once a step.

    Attributes:
        seconds: until then.
        messages, collectives, apart, once: as a clock's.
    """

    seconds: float = 0.0
    messages: float = 0.0
    collectives: float = 0.0
    apart: float = 0.0
    once: float = 0.0

    @property
    def own(self) -> float:
        """Seconds without what the rank has waited for other stages."""
        return self.seconds - self.messages

    @property
    def again(self) -> float:
        """Seconds of its own without units that are gathered or reduced once a step."""
        return self.own - self.once


@dataclass
class Clock:
    """The times of a rank's host and streams, and what its step has taken.

    Attributes:
        host, computation: seconds.
        used: when the last gathered unit was taken into use.
        computed: seconds of operators since then.
        beside: (start, end) of FSDP2's collectives that may have gone on since then.
        scattered: when the last reduction of a unit over its shards is done.
        reduced: when all reductions are done, those between replicas too.
        apart: seconds that computation has waited for FSDP2's collectives.
        streams: seconds of each group's, FSDP2's gathering and reduction apart.
        copying: seconds of each stream of copies between accelerator and host, by number.
        copied: (stream, number) of a copy -> when it is done.
        thread: seconds of the host's thread.
        hosting: seconds in which the host, or its thread, computes.
        busy: seconds of operators.
        launching: seconds of the host's launches.
        messages: seconds that computation has waited for messages.
        collectives: seconds that it has waited for collectives.
        once: seconds of operators that gather or reduce a unit once a step.
        worked: the microbatches' part of all this.
    """

    host: float = 0.0
    computation: float = 0.0
    used: float = 0.0
    computed: float = 0.0
    beside: list[tuple[float, float]] = field(default_factory=list)
    scattered: float = 0.0
    reduced: float = 0.0
    apart: float = 0.0
    streams: dict[tuple[Stream, str], float] = field(default_factory=dict)
    copying: dict[int, float] = field(default_factory=dict)
    copied: dict[tuple[int, int], float] = field(default_factory=dict)
    thread: float = 0.0
    hosting: float = 0.0
    busy: float = 0.0
    launching: float = 0.0
    messages: float = 0.0
    collectives: float = 0.0
    once: float = 0.0
    worked: Worked = field(default_factory=Worked)


class Replay(RankWorld):
    """Ranks of all stages in time.

    Attributes:
        clocks: by rank.
        slices: of all, in the order in which they were found.
    """

    def __init__(self, ranks: Mapping[int, Program], roofline: Roofline) -> None:
        super().__init__(ranks)
        self.clocks = {rank: Clock() for rank in ranks}
        self.slices: list[TimelineSlice] = []
        self._roofline = roofline

    @property
    def seconds(self) -> float:
        """Seconds of the traced step: of the slowest rank."""
        return max(
            max(clock.host, clock.computation, clock.reduced, clock.thread, *clock.copying.values())
            for clock in self.clocks.values()
        )

    def members(self, turn: Turn) -> Sequence[int]:
        return [member for member in self.group(turn) if member in self.ranks]

    def goes_on(self, rank: RankState, entry: Entry) -> bool:
        clock = self.clocks[rank.number]
        if isinstance(entry, Operators):
            self._operate(rank.number, clock, entry)
        elif isinstance(entry, Read):
            waited = max(0.0, clock.computation - clock.host)
            self.slices.append(TimelineSlice(rank.number, HOST, f"waits in {entry.line}", clock.host, waited))
            clock.host += waited
        elif isinstance(entry, Copy):
            self._copy(rank.number, clock, entry)
        elif isinstance(entry, CopyWait):
            self._wait_for_copies(clock, entry)
        elif isinstance(entry, HostWork):
            self._compute_on_host(rank.number, clock, entry)
        elif isinstance(entry, Joined):
            clock.host = max(clock.host, clock.thread)
        elif not super().goes_on(rank, entry):
            return False
        elif isinstance(entry, Wait):
            self._wait(clock, rank.turns[entry.number], entry)
        return True

    def _operate(self, rank: int, clock: Clock, operators: Operators) -> None:
        if operators.phase == UPDATE:
            self._slow(clock)
            self._wait_for_units(clock, clock.reduced)
        device, host = self._roofline.device_seconds(operators), self._roofline.host_seconds(operators)
        start = max(clock.computation, clock.host)
        clock.host += host
        clock.computation = max(start + device, clock.host)
        clock.busy += device
        clock.computed += device
        clock.launching += host
        clock.once += device if operators.once else 0.0
        seconds = clock.computation - start
        if operators.phase == BACKWARD or (operators.phase != UPDATE and operators.multiplies):
            clock.worked = Worked(clock.computation, clock.messages, clock.collectives, clock.apart, clock.once)
        self.slices.append(TimelineSlice(rank, COMPUTATION, operators.phase, start, seconds, operators))

    def _copy(self, rank: int, clock: Clock, copy: Copy) -> None:
        """Copy on a stream of its own, or on that of computation."""
        seconds, beside = self._roofline.copy_seconds(copy.bytes), copy.stream != 0
        free = clock.copying.get(copy.stream, 0.0) if beside else clock.computation
        start = max(clock.host, free)
        if beside:
            clock.copying[copy.stream] = start + seconds
        else:
            clock.computation = start + seconds
        clock.copied[copy.stream, copy.number] = start + seconds
        if copy.waits:
            clock.host = start + seconds
        name = "to the host" if copy.to_host else "from the host"
        self.slices.append(TimelineSlice(rank, COPIES if beside else COMPUTATION, name, start, seconds))

    def _wait_for_copies(self, clock: Clock, wait: CopyWait) -> None:
        """Let the host, its thread or a stream come after copies, a stream of copies after what it is given as well.

        That is made by computation, or by FSDP2's reduction, whose streams have no copies.
        """
        done = max((clock.copied.get(copy, 0.0) for copy in wait.streams), default=0.0)
        if wait.waiter == HOST_WAITS:
            clock.host = max(clock.host, done)
        elif wait.waiter == THREAD_WAITS:
            clock.thread = max(clock.thread, done)
        elif wait.waiter == 0:
            clock.computation = max(clock.computation, done)
        else:
            streams = {stream for stream, _ in wait.streams}
            computed = clock.computation if 0 in streams else 0.0
            reduced = clock.reduced if streams - {0} - {stream for stream, _ in clock.copied} else 0.0
            clock.copying[wait.waiter] = max(clock.copying.get(wait.waiter, 0.0), done, computed, reduced)

    def _compute_on_host(self, rank: int, clock: Clock, work: HostWork) -> None:
        seconds = self._roofline.host_memory_seconds(work.bytes)
        start = max(clock.host, clock.thread) if work.beside else clock.host
        if work.beside:
            clock.thread = start + seconds
        else:
            clock.host = start + seconds
        clock.hosting += seconds
        stream = THREAD if work.beside else HOST
        self.slices.append(TimelineSlice(rank, stream, "works in its memory", start, seconds))

    def _wait(self, clock: Clock, turn: Turn, entry: Wait) -> None:
        call = turn.calls[0]
        if call.is_apart and not entry.at_use:
            return
        if call.on_host:
            clock.host = max(clock.host, turn.done)
            return
        waited = max(0.0, turn.done - max(clock.computation, clock.host))
        clock.computation = max(clock.computation, turn.done)
        if entry.at_use:
            self._slow(clock)
            clock.used = clock.computation
        if call.is_message:
            clock.messages += waited
        else:
            clock.collectives += waited
            clock.apart += waited if call.is_apart else 0.0

    def _slow(self, clock: Clock) -> None:
        """Add what computation and the collectives beside it have lost to each other."""
        now = clock.computation
        moved = sum(max(0.0, min(end, now) - start) for start, end in clock.beside)
        both = self._roofline.beside_seconds(clock.computed, moved)
        clock.computation += both - max(clock.computed, moved)
        clock.computed, clock.beside = 0.0, [(max(now, start), end) for start, end in clock.beside if end > now]

    def issued(self, rank: RankState, turn: Turn) -> None:
        clock, call = self.clocks[rank.number], turn.calls[0]
        if call.on_host:
            turn.ready = clock.host
            return
        if call.is_apart and call.operation == "all_gather":
            turn.ready = max(clock.host, clock.used)
            return
        of_all = not call.is_message and len(rank.program.partitions[call.partition]) == 1
        if of_all:
            self._wait_for_units(clock, clock.reduced)
        elif call.is_apart and call.operation == "reduce_scatter":
            self._wait_for_units(clock, clock.scattered)
        turn.ready = max(clock.host, clock.computation)
        if call.is_apart and call.operation == "all_reduce":  # between replicas, of what has just been scattered
            turn.ready = max(turn.ready, clock.scattered)

    def _wait_for_units(self, clock: Clock, done: float) -> None:
        clock.apart += max(0.0, done - clock.computation)
        clock.computation = max(clock.computation, done)

    def met(self, turns: Sequence[Turn], calls: Sequence[Call]) -> None:
        super().met(turns, calls)
        seconds = self._roofline.call_seconds(calls[0], self.group(turns[0]))
        keys = [(turn.stream, _part_of_stream(call)) for turn, call in zip(turns, calls, strict=True)]
        clocks = [self.clocks[turn.rank] for turn in turns]
        free = (max(turn.ready, clock.streams.get(key, 0.0)) for turn, clock, key in zip(turns, clocks, keys))
        start = max(free)
        for turn, call, clock, key in zip(turns, calls, clocks, keys, strict=True):
            clock.streams[key] = start + seconds
            turn.done = max(turn.done, start + seconds)
            if call.is_apart:
                clock.beside.append((start, start + seconds))
            if call.is_apart and call.operation != "all_gather":
                clock.reduced = max(clock.reduced, turn.done)
                clock.scattered = turn.done if call.operation == "reduce_scatter" else clock.scattered
            stream = f"{call.group}: {key[1]}" if key[1] else call.group
            self.slices.append(TimelineSlice(turn.rank, stream, str(call), start, seconds, call))


def _part_of_stream(call: Call) -> str:
    """Return the operation that has a stream of its own: FSDP2's, and what goes and comes between two ranks."""
    return call.operation if call.is_apart or call.is_message else ""
