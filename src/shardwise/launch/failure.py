"""The report of a failing worker to its launcher: one small JSON file for each rank in a private directory.

The file is written where the error is first seen, before the process group is torn down, because tearing it down makes
other ranks fail too. The cause is then the earliest report of a rank that had not already lost a peer. Nothing is
pickled. Without a launcher of ours (torchrun, Slurm) the directory is not set and nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from shardwise import errors
from shardwise.errors import ShardwiseError, WorkerError
from shardwise.errors.exit_codes import FAULT

DIRECTORY_VARIABLE = "SHARDWISE_FAILURE_DIRECTORY"
PEER_GRACE_SECONDS = 0.5  # a killed process closes its sockets a moment before it counts as dead

_reported = False  # in this process, whether anybody listens or not


@dataclass(frozen=True)
class Failure:
    """One rank's own error. `classes` are the names of its class and bases, nearest first."""

    rank: int
    time_ns: int
    classes: list[str]
    message: str
    traceback: str
    exit_code: int
    dead_before: list[int]  # ranks that had died without a word before: theirs is the cause

    @property
    def is_users(self) -> bool:
        return ShardwiseError.__name__ in self.classes

    @property
    def said(self) -> str:
        """The message and whose it is. That of a failed save or load is everyone's, and says so by itself."""
        return self.message if re.match(r"rank \d+: ", self.message) else f"rank {self.rank}: {self.message}"

    def to_error(self, output: str) -> ShardwiseError:
        """The error to raise in the launcher: of the same class where it is one of ours, else with `output` above."""
        if not self.is_users:
            return WorkerError(f"rank {self.rank} failed:\n{output}{self.traceback.rstrip()}")
        name = next(name for name in self.classes if hasattr(errors, name))
        error: ShardwiseError = getattr(errors, name)(self.said)
        error.exit_code = self.exit_code
        return error


def announce(directory: Path) -> None:
    """Called by each worker at its start; `report` looks here for peers that are gone."""
    directory.mkdir(exist_ok=True)
    os.environ[DIRECTORY_VARIABLE] = str(directory)
    (directory / f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))


def announced(directory: Path) -> set[int]:
    """Return the process numbers of the workers that have come as far as `announce`."""
    texts = [path.read_text() for path in directory.glob("rank-*.pid")]
    return {int(text) for text in texts if text}


def report(error: BaseException) -> list[int]:
    """Write this rank's failure, if a launcher of ours listens; returns the ranks that had died before it.

    The first report stays: it is nearest to the cause.
    """
    global _reported
    _reported = True
    if not os.environ.get(DIRECTORY_VARIABLE):
        return []
    directory, rank, now = Path(os.environ[DIRECTORY_VARIABLE]), int(os.environ["RANK"]), time.time_ns()
    final = directory / f"rank-{rank}.json"
    if final.exists():
        return _read(final).dead_before
    failure = Failure(
        rank=rank,
        time_ns=now,
        classes=[base.__name__ for base in type(error).__mro__],
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        exit_code=getattr(error, "exit_code", FAULT),
        dead_before=[] if isinstance(error, ShardwiseError) else _dead_peers(directory, rank),
    )
    partial = final.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(failure)))
    partial.replace(final)  # so that it appears whole
    return failure.dead_before


def is_reported() -> bool:
    """Return whether this process has failed."""
    return _reported


def forget() -> None:
    """A new group begins, which no failure has touched."""
    global _reported
    _reported = False


def collect(directory: Path) -> list[Failure]:
    """All reports, the cause first; a WorkerError only repeats what another rank said."""
    failures = [_read(path) for path in directory.glob("rank-*.json")]
    return sorted(failures, key=lambda f: (bool(f.dead_before), f.classes[0] == "WorkerError", f.time_ns))


def _read(path: Path) -> Failure:
    return Failure(**json.loads(path.read_text()))


def _dead_peers(directory: Path, rank: int) -> list[int]:
    """Other ranks of this host that are gone and left no report."""
    end = time.monotonic() + PEER_GRACE_SECONDS
    while True:
        dead = []
        for path in directory.glob("rank-*.pid"):
            peer = int(path.stem.removeprefix("rank-"))
            if peer != rank and not _alive(path) and not path.with_suffix(".json").exists():
                dead.append(peer)
        if dead or time.monotonic() > end:
            return sorted(dead)
        time.sleep(0.02)


def _alive(path: Path) -> bool:
    text = path.read_text()
    with contextlib.suppress(psutil.NoSuchProcess):
        return not text or psutil.Process(int(text)).status() != psutil.STATUS_ZOMBIE
    return False
