"""The record of where a rank is: its phase, the collective that it waits in, and how long its last steps took.

The watcher of the launcher reads it (`shardwise.launch.watch`). It lies in memory that another process can read: a
rank that is stopped, swapped out or blocked in C answers no question. A mark is a write or two of less than a
microsecond; none of them waits, and none goes to a disk.

    begin_unit(WorkUnit.STEP, 12)  # a step, a batch of an evaluation, a save: what is done in about equal times
    mark_phase("forward")

Collectives are marked by their names (`shardwise.collectives.names`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from shardwise.collectives.names import OTHER_THREADS, CollectiveName, record_names_in

THREADS = 1 + OTHER_THREADS  # whose collectives are recorded; the main thread has the first place

SIZE = mmap.PAGESIZE
MAGIC = b"shrdrec1"
KEPT = 32  # durations of each unit
ISSUED = 4096  # collectives that are kept for those that a GPU has not ended
_HEADER = struct.Struct("<8siiQ")  # magic, process, rank, main thread
_UNIT = struct.Struct("<qqq")  # index in UNITS, step, when it began in nanoseconds of the monotonic clock
_PHASE = struct.Struct("<q160s")  # when it began, name
_COLLECTIVE = struct.Struct("<qq240s")  # when it began (0: there is none), number in its group, name
_TIMES = struct.Struct(f"<q{KEPT}d")  # how many there have been, seconds
_AT_UNIT, _AT_PHASE, _AT_COLLECTIVES, _AT_TIMES = 64, 128, 320, 320 + THREADS * _COLLECTIVE.size
_NONE = struct.pack("<q", 0)


class WorkUnit(StrEnum):
    """Work that takes about equally long each time, as a step does, and what lies between two pieces of it."""

    START = "start"
    STEP = "step"
    EVALUATION = "evaluation"
    SAVE = "checkpoint.save"
    OUTSIDE = "outside of a step"


UNITS = tuple(WorkUnit)


@dataclass(frozen=True)
class RecordedCollective:
    """A collective that a thread of a rank is in: its name, its number in its group, and since when (ns)."""

    name: str
    sequence: int
    began: int


@dataclass(frozen=True)
class RecordedPlace:
    """The content of a rank's record at one moment; times in nanoseconds of the host's monotonic clock.

    Attributes:
        pid, rank, thread: the process, its rank in the world, and the identity of its main thread.
        unit, step, began: what it is at, after how many steps, and since when.
        phase, phase_began: part of the unit.
        collectives: of its threads, the main one first.
        seconds: of the last units of each kind, the newest last.
    """

    pid: int
    rank: int
    thread: int
    unit: WorkUnit
    step: int
    began: int
    phase: str
    phase_began: int
    collectives: tuple[RecordedCollective, ...]
    seconds: dict[WorkUnit, tuple[float, ...]]


@dataclass(frozen=True)
class IssuedCollective:
    """A collective that the host has entered and left, by the wall clock (ns); on CUDA it may go on after that."""

    name: str
    group: str
    entered: int
    left: int


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a rank's main thread since the step began: its waits for data, and in collectives."""

    data: float
    communication: float


class RankRecord:
    """Writes a rank's record.

    Attributes:
        descriptor: of the memory; another process of the same user opens it under /proc.
        path: for such a process.
        data_seconds, communication_seconds: of the main thread since the step began.
    """

    def __init__(self, rank: int) -> None:
        self.descriptor, self.path = shared_memory("rank-record", SIZE)
        self._memory = mmap.mmap(self.descriptor, SIZE)
        self._unit, self._step, self._began = WorkUnit.START, 0, time.monotonic_ns()
        self._phase, self._phase_began, self._entered = str(WorkUnit.START), self._began, 0
        self._sequences: defaultdict[str, int] = defaultdict(int)
        self._issued: deque[tuple[CollectiveName, list[int]]] | None = None
        self._open: defaultdict[int, list[list[int]]] = defaultdict(list)  # times of those that a thread is in
        self._counts = dict.fromkeys(UNITS, 0)
        self.data_seconds = self.communication_seconds = 0.0
        _HEADER.pack_into(self._memory, 0, MAGIC, os.getpid(), rank, threading.main_thread().ident or 0)
        _UNIT.pack_into(self._memory, _AT_UNIT, UNITS.index(self._unit), 0, self._began)
        self.mark_phase(self._phase)

    def begin_unit(self, unit: WorkUnit, step: int | None = None) -> None:
        """Note that what was done before has ended, and that another unit begins after `step` steps; None: as many."""
        now = time.monotonic_ns()
        count, place = self._counts[self._unit], _AT_TIMES + UNITS.index(self._unit) * _TIMES.size
        struct.pack_into("<d", self._memory, place + 8 + 8 * (count % KEPT), (now - self._began) / 1e9)
        struct.pack_into("<q", self._memory, place, count + 1)
        self._counts[self._unit] += 1
        self._unit, self._began = unit, now
        if unit is WorkUnit.STEP:
            self.data_seconds = self.communication_seconds = 0.0
        self._step = self._step if step is None else step
        _UNIT.pack_into(self._memory, _AT_UNIT, UNITS.index(unit), self._step, now)

    def keep_issued(self) -> None:
        """Keep the newest collectives that were entered, from now on."""
        self._issued = deque(maxlen=ISSUED)

    def issued(self) -> list[IssuedCollective]:
        """Return the newest collectives that were entered, the newest last."""
        now = time.time_ns()
        return [
            IssuedCollective(str(name), name.group, times[0], times[1] if len(times) > 1 else now)
            for name, times in list(self._issued or ())
        ]

    def mark_phase(self, phase: str) -> None:
        """Note that another phase begins."""
        now = time.monotonic_ns()
        if self._phase == "data":
            self.data_seconds += (now - self._phase_began) / 1e9
        self._phase, self._phase_began = phase, now
        _PHASE.pack_into(self._memory, _AT_PHASE, now, _encoded(phase))

    @property
    def phase(self) -> str:
        """The phase that was marked last."""
        return self._phase

    def enter(self, thread: int, name: CollectiveName, outer: CollectiveName | None) -> None:
        """Note that a thread, by its place, enters a collective, inside of another or not."""
        now = time.monotonic_ns()
        if outer is None and thread == 0:
            self._entered = now
        self._sequences[name.group] += 1
        if self._issued is not None:
            times = [time.time_ns()]
            self._issued.append((name, times))
            self._open[thread].append(times)
        self._write_collective(thread, now, name)

    def leave(self, thread: int, outer: CollectiveName | None) -> None:
        """Note that a thread has left a collective, and that it is in `outer` again, where there is one."""
        now = time.monotonic_ns()
        if self._open[thread]:
            self._open[thread].pop().append(time.time_ns())
        if outer is not None:
            return self._write_collective(thread, now, outer)
        if thread == 0:
            self.communication_seconds += (now - self._entered) / 1e9
        place = _AT_COLLECTIVES + thread * _COLLECTIVE.size
        self._memory[place : place + 8] = _NONE

    def _write_collective(self, thread: int, now: int, name: CollectiveName) -> None:
        place = _AT_COLLECTIVES + thread * _COLLECTIVE.size
        _COLLECTIVE.pack_into(self._memory, place, now, self._sequences[name.group], name.encoded)


@cache
def _encoded(text: str) -> bytes:
    return text.encode()


def shared_memory(name: str, size: int) -> tuple[int, str]:
    """Return the descriptor and the path of some memory that other processes of this user can open. It has no file.

    Where the system has no such memory (macOS), it is a file without a name: nobody else can open it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:
        with tempfile.TemporaryFile() as file:
            descriptor, path = os.dup(file.fileno()), ""
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor, path


def parse_record(content: bytes) -> RecordedPlace | None:
    """Return what a record says; None where it is none, or not yet written."""
    if len(content) < SIZE or content[:8] != MAGIC:
        return None
    _, pid, rank, thread = _HEADER.unpack_from(content, 0)
    unit, step, began = _UNIT.unpack_from(content, _AT_UNIT)
    phase_began, phase = _PHASE.unpack_from(content, _AT_PHASE)
    return RecordedPlace(
        pid=pid,
        rank=rank,
        thread=thread,
        unit=UNITS[unit],
        step=step,
        began=began,
        phase=_text(phase),
        phase_began=phase_began,
        collectives=tuple(_collectives(content)),
        seconds={name: _seconds(content, index) for index, name in enumerate(UNITS)},
    )


def _collectives(content: bytes) -> Iterator[RecordedCollective]:
    for thread in range(THREADS):
        began, sequence, name = _COLLECTIVE.unpack_from(content, _AT_COLLECTIVES + thread * _COLLECTIVE.size)
        if began:
            yield RecordedCollective(_text(name), sequence, began)


def _seconds(content: bytes, unit: int) -> tuple[float, ...]:
    count, *seconds = _TIMES.unpack_from(content, _AT_TIMES + unit * _TIMES.size)
    newest = count % KEPT
    return tuple(seconds[:count] if count <= KEPT else seconds[newest:] + seconds[:newest])


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


# ---- this process's own

_record: RankRecord | None = None


def open_record(rank: int) -> RankRecord:
    """Begin this process's record, where there is none yet, and return it."""
    global _record
    if _record is None:
        _record = RankRecord(rank)
        record_names_in(_record)
    return _record


def _close_in_fork() -> None:
    """Leave the record to the process that has opened it: a data loader's fork is no rank."""
    global _record
    _record = None
    record_names_in(None)


os.register_at_fork(after_in_child=_close_in_fork)


def begin_unit(unit: WorkUnit, step: int | None = None) -> None:
    """Note that a unit of work begins after `step` steps; None: after as many as the last one."""
    if _record is not None:
        _record.begin_unit(unit, step)


def mark_phase(phase: str) -> None:
    """Note which part of a unit begins."""
    if _record is not None:
        _record.mark_phase(phase)


def step_times() -> StepTimes:
    """Return what the step of this rank has waited for so far; the phase of data is over."""
    return StepTimes(0.0, 0.0) if _record is None else StepTimes(_record.data_seconds, _record.communication_seconds)


def current_phase() -> str:
    """Return the phase that was marked last; empty without a record."""
    return "" if _record is None else _record.phase
