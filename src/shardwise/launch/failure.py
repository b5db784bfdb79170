"""How a failing worker tells its launcher what happened: one small JSON file for each rank in a private directory.

The file is written where the error is first seen, before the process group is torn down, because tearing it down makes
other ranks fail too; the earliest file is then the cause. Nothing is pickled. Without a launcher of ours (torchrun,
Slurm) the directory is not set and nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise import errors
from shardwise.errors import ShardwiseError, WorkerError

DIRECTORY_VARIABLE = "SHARDWISE_FAILURE_DIRECTORY"


@dataclass(frozen=True)
class Failure:
    """One rank's own error. `classes` are the names of its class and bases, nearest first."""

    rank: int
    time_ns: int
    classes: list[str]
    message: str
    traceback: str
    exit_code: int
    dead_before: list[int]  # ranks that had already died without a word: theirs is the cause

    @property
    def is_users(self) -> bool:
        return ShardwiseError.__name__ in self.classes

    def to_error(self) -> ShardwiseError:
        """The error to raise in the launcher: of the same class where it is one of ours."""
        if not self.is_users:
            return WorkerError(f"rank {self.rank} failed:\n{self.traceback.rstrip()}")
        name = next(name for name in self.classes if issubclass(getattr(errors, name, object), ShardwiseError))
        error: ShardwiseError = getattr(errors, name)(f"rank {self.rank}: {self.message}")
        error.exit_code = self.exit_code
        return error


def report(error: BaseException, dead_before: list[int] | None = None) -> None:
    """Write this rank's failure unless it has been written already; the first report is nearest to the cause."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    rank = int(os.environ["RANK"])
    failure = Failure(
        rank=rank,
        time_ns=time.time_ns(),
        classes=[base.__name__ for base in type(error).__mro__],
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        exit_code=getattr(error, "exit_code", 1),
        dead_before=dead_before or [],
    )
    temporary = Path(directory) / f"rank-{rank}.partial"
    temporary.write_text(json.dumps(asdict(failure)))
    with contextlib.suppress(FileExistsError):
        os.link(temporary, Path(directory) / f"rank-{rank}.json")  # appears whole, and never replaces an earlier one
    temporary.unlink()


def collect(directory: Path) -> list[Failure]:
    """All reports, the cause first: ranks with errors of their own before those that only lost a peer."""
    failures = [Failure(**json.loads(path.read_text())) for path in directory.glob("rank-*.json")]
    return sorted(failures, key=lambda f: (bool(f.dead_before), f.classes[0] == "WorkerError", f.time_ns))
