"""Positions of ranks: what the record, the stacks and the kernel say together of where each of a host's ranks is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.collectives.rank_record import RecordedPlace
from shardwise.launch.watch.announced import AnnouncedRank
from shardwise.launch.watch.process import GONE, STOPPED, sample_process, state_between
from shardwise.launch.watch.stack import StackFrame, Stacks, collective_of, parse_stacks, telling_frame, telling_stack

STACK_SECONDS = 1.0  # that a rank has to write its stacks
LOOK_SECONDS = 0.02
SETTLED_SECONDS = 0.1  # without another line, after which they are whole


@dataclass(frozen=True)
class RankPosition:
    """The position of a rank.

    Attributes:
        rank, host, step: which rank, where, and how many steps it has done.
        state: `gone`, `stopped`, `swapped`, `disk`, or empty.
        phase: part of the step, or what it does instead of one.
        collective: that it waits in; empty where it waits in none.
        frame: the line of the user's code or of this package that it is at; empty where it could not answer.
        seconds: since it has entered the collective, or else the phase.
        stack: its frames, the innermost first.
        sequence: number of the collective among those that it has entered in this group; 0 where it is not known.
    """

    rank: int
    host: str
    step: int
    state: str
    phase: str
    collective: str
    frame: str
    seconds: float
    stack: tuple[str, ...] = ()
    sequence: int = 0

    @property
    def waits(self) -> bool:
        """True where it waits for other ranks."""
        return bool(self.collective) and self.state not in (GONE, STOPPED)


def gather_positions(ranks: Sequence[AnnouncedRank], host: str) -> list[RankPosition]:
    """Return where ranks of this host are. Takes about a second where one does not answer."""
    began = time.monotonic()
    for rank in ranks:
        rank.request_collective()
    places = {rank: rank.place() for rank in ranks}  # ahead of the stacks: a signal ends a sleep in C
    before = {rank: sample_process(rank.pid) for rank in ranks}
    stacks = _stacks([rank for rank in ranks if before[rank].state not in (GONE, STOPPED)])
    positions = []
    for rank in ranks:
        state = state_between(before[rank], sample_process(rank.pid), time.monotonic() - began)
        positions.append(_position(rank, places[rank], host, state, stacks.get(rank, {})))
    return positions


def _stacks(ranks: Sequence[AnnouncedRank]) -> dict[AnnouncedRank, Stacks]:
    """Ask all of them for their stacks, and give them some time."""
    begins = {rank: begin for rank in ranks if (begin := rank.request_stacks()) is not None}
    end = time.monotonic() + STACK_SECONDS
    texts = dict.fromkeys(begins, "")
    changed = time.monotonic()
    while time.monotonic() < end and not (all(texts.values()) and time.monotonic() - changed > SETTLED_SECONDS):
        time.sleep(LOOK_SECONDS)
        written = {rank: rank.read_stacks(begin) for rank, begin in begins.items()}
        if written != texts:
            texts, changed = written, time.monotonic()
    return {rank: parse_stacks(text) for rank, text in texts.items()}


def _position(rank: AnnouncedRank, place: RecordedPlace | None, host: str, state: str, stacks: Stacks) -> RankPosition:
    if place is None or state == GONE:
        return RankPosition(rank.rank, host, 0, GONE, "", "", "", 0.0)
    stack = telling_stack(stacks, place.thread)
    frame = telling_frame(stack)
    collective, since, sequence = _collective(place, stack)
    on_gpu, issued = rank.read_collective()
    if on_gpu:
        sequence, collective, since = 0, on_gpu, time.monotonic_ns() - (time.time_ns() - issued)
    elif collective and frame is not None and not place.collectives:
        collective = f"{collective} at {frame.short_file}:{frame.line}"
    return RankPosition(
        rank.rank,
        host,
        place.step,
        state,
        place.phase,
        collective,
        "" if frame is None else str(frame),
        (time.monotonic_ns() - since) / 1e9,
        tuple(f"{frame.file}:{frame.line} in {frame.function}" for frame in stack),
        sequence,
    )


def _collective(place: RecordedPlace, stack: Sequence[StackFrame]) -> tuple[str, int, int]:
    """Return the collective that a rank waits in (empty for none), since when it is at its place, and its number."""
    if place.collectives:
        recorded = place.collectives[0]
        return recorded.name, recorded.began, recorded.sequence
    return collective_of(stack), place.phase_began, 0
