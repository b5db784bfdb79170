"""The ranks of a host that can be asked where they are: what each leaves for its launcher when it starts.

A rank answers in two ways. Its record (`shardwise.collectives.rank_record`) is read whatever the rank is doing. Its
stacks come from Python's faulthandler, at a signal: they are written in C, so a rank answers that waits in a collective
or holds the interpreter for ever; one that is stopped does not. Nothing is pickled, and nobody but this user can read
either.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shardwise.collectives.rank_record import RecordedPlace, open_record, parse_record, shared_memory
from shardwise.launch.watch.flight_recorder import answer_questions, ask

# The last real-time signal: scripts and libraries have uses of their own for SIGUSR1 and SIGUSR2.
STACK_SIGNAL: signal.Signals = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
SUFFIX = ".place"


@dataclass(frozen=True)
class AnnouncedRank:
    """A rank's process, the paths of its record and of what its stacks are written to, and where it has said so."""

    rank: int
    pid: int
    record: str
    stack: str
    directory: str = ""

    def place(self) -> RecordedPlace | None:
        """Return what its record says now; None where the process is gone."""
        try:
            return parse_record(Path(self.record).read_bytes())
        except OSError:
            return None

    def request_stacks(self) -> int | None:
        """Ask for the stacks of its threads; returns where they will begin, or None where it is gone."""
        try:
            begin = Path(self.stack).stat().st_size  # there, so the process is the one that wrote this
            os.kill(self.pid, STACK_SIGNAL)
        except OSError:
            return None
        return begin

    def read_stacks(self, begin: int) -> str:
        """Return what it has written since."""
        with suppress(OSError), open(self.stack, encoding="utf-8", errors="replace") as file:
            file.seek(begin)
            return file.read()
        return ""

    def request_collective(self) -> bool:
        """Ask for the collective that its GPU waits in; returns whether it has a GPU and listens."""
        self._flight.unlink(missing_ok=True)
        return ask(Path(self.directory) / f"rank-{self.rank}.ask")

    def read_collective(self) -> tuple[str, int]:
        """Return the collective that its GPU waits in, and when it was issued (wall clock, ns); empty for none."""
        with suppress(OSError, ValueError, KeyError):
            answer = json.loads(self._flight.read_text(encoding="utf-8"))
            return str(answer["collective"]), int(answer["created"])
        return "", 0

    @property
    def _flight(self) -> Path:
        return Path(self.directory) / f"rank-{self.rank}.flight"


def announce_rank(directory: Path, rank: int) -> None:
    """Let the launcher, which looks in `directory`, ask this process from now on where it is."""
    record = open_record(rank)
    descriptor, path = shared_memory("rank-stacks", 0)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)
    announced = AnnouncedRank(rank, os.getpid(), record.path, path, str(directory))
    if torch.cuda.is_available():
        answer_questions(directory / f"rank-{rank}.ask", directory / f"rank-{rank}.flight", record)
    final = directory / f"rank-{rank}{SUFFIX}"
    partial = final.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(announced)), encoding="utf-8")
    partial.replace(final)


def announced_ranks(directory: Path) -> list[AnnouncedRank]:
    """Return the ranks that have announced themselves in a directory, in order."""
    texts = (path.read_text(encoding="utf-8") for path in directory.glob(f"rank-*{SUFFIX}"))
    return sorted((AnnouncedRank(**json.loads(text)) for text in texts), key=lambda rank: rank.rank)
