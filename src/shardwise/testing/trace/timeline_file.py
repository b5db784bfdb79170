"""A replayed step as a file that https://ui.perfetto.dev and chrome://tracing open.

A process is a rank, a thread one of its streams, a counter the bytes alive by owner. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.testing.trace.job import JobTrace, where
from shardwise.testing.trace.program import Call, Operators
from shardwise.testing.trace.replay import COMPUTATION, HOST, TimelineSlice
from shardwise.testing.trace.step_time import StepTime
from shardwise.testing.trace.storages import OWNERS

MICRO = 1e6
MIB = 2**20
FIRST = (HOST, COMPUTATION)  # threads that are shown above the others


def write_timeline(path: Path, trace: JobTrace, time: StepTime) -> None:
    """Write the timeline of a traced job's step."""
    path.write_text(json.dumps({"traceEvents": [*_events(trace, time)]}), encoding="utf-8")


def _events(trace: JobTrace, time: StepTime) -> Iterator[dict[str, Any]]:
    names = {rank.rank: where(rank.coordinates) for rank in trace.ranks}
    for rank in time.clocks:
        yield _name("process_name", rank, 0, f"rank {rank} ({names[rank]})")
    threads: dict[tuple[int, str], int] = {}
    for rank in time.clocks:
        streams = dict.fromkeys([*FIRST, *(piece.stream for piece in time.slices if piece.rank == rank)])
        for number, stream in enumerate(streams):
            threads[rank, stream] = number
            yield _name("thread_name", rank, number, stream)
    for piece in time.slices:
        yield _slice(piece, threads[piece.rank, piece.stream])
        if isinstance(piece.entry, Operators):
            yield _memory(piece, piece.entry)


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _slice(piece: TimelineSlice, thread: int) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if isinstance(piece.entry, Call):
        args = {"line": piece.entry.line, "block": piece.entry.block, "bytes": piece.entry.bytes}
    elif isinstance(piece.entry, Operators):
        args = {"launches": piece.entry.launches}
    start, seconds = piece.start * MICRO, piece.seconds * MICRO
    return {"ph": "X", "name": piece.name, "pid": piece.rank, "tid": thread, "ts": start, "dur": seconds, "args": args}


def _memory(piece: TimelineSlice, operators: Operators) -> dict[str, Any]:
    sizes = {owner: size / MIB for owner, size in zip(OWNERS, operators.memory, strict=True)}
    end = (piece.start + piece.seconds) * MICRO
    return {"ph": "C", "name": "memory, MiB", "pid": piece.rank, "ts": end, "args": sizes}
