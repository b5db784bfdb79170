"""The cause that ended an attempt: which of the ranks that failed is the cause, and what error that is in the launcher.

Each attempt has a directory of its own for the reports of its workers (`shardwise.launch.failure`), so that a later
attempt is never explained by an earlier one's.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError, ShardwiseError, WorkerError
from shardwise.errors.exit_codes import MISTAKE
from shardwise.launch import failure

UNGUARDED_EXIT = 113  # of a worker that is led back to the launcher by the script that it imports
UNGUARDED = (
    "a worker imports the script that starts it, and would start workers again; put what the script does below "
    '`if __name__ == "__main__":`'
)
OUTPUT_LINES = 30  # of a failed rank's stderr


@dataclass(frozen=True)
class FailureDiagnosis:
    """The first failing rank's own error. `summary` says it in one line; `repeats` is whether a restart is useless."""

    error: ShardwiseError
    summary: str
    repeats: bool

    def after(self, restarts: int) -> ShardwiseError:
        """`error`, which says how many restarts were made before."""
        if restarts:
            self.error.args = (f"after {restarts} restart{'s' * (restarts > 1)}: {self.error}",)
        return self.error


def reports_of(directory: Path, attempt: int) -> Path:
    """Return the directory in which the workers of attempt 0, 1, ... leave their reports."""
    return directory / f"attempt-{attempt}"


def logs_of(directory: Path) -> Path:
    """Return the directory in which torch keeps what the workers write."""
    return directory / "output"


def diagnose_failure(
    directory: Path, attempt: int, workers: int, ended: dict[int, int], first_rank: int = 0
) -> FailureDiagnosis:
    """The cause of a failure in which the ranks `ended` (with their exit codes, minus the signal) ended early.

    `first_rank` is the first of this host's ranks.
    """
    if UNGUARDED_EXIT in ended.values():
        return FailureDiagnosis(ConfigError(UNGUARDED), UNGUARDED, repeats=True)
    reports = failure.collect(reports_of(directory, attempt))
    silent = sorted(ended.keys() - {report.rank for report in reports})
    if reports and (not reports[0].dead_before or not silent):
        cause = reports[0]
        error = cause.to_error(_last_output(directory, attempt, cause.rank, first_rank))
        return FailureDiagnosis(error, _summary(cause), cause.is_users and error.exit_code == MISTAKE)
    rank = silent[0] if silent else min(ended)
    summary = f"rank {rank} of {workers} {_end_of(ended[rank])}"
    output = _last_output(directory, attempt, rank, first_rank)
    return FailureDiagnosis(WorkerError(output + summary), summary, repeats=False)


def _summary(cause: failure.Failure) -> str:
    if cause.is_users:
        return cause.said.splitlines()[0]
    first = (cause.message.splitlines() or [""])[0]
    return f"rank {cause.rank}: {cause.classes[0]}: {first}"


def _end_of(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and no error of its own"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has no name
        name = "a signal"
    how = f"was killed by {name} (signal {-exit_code})"
    if exit_code == -signal.SIGKILL:
        how += ", which is what the kernel does to a process when memory runs out"
    return how


def _last_output(directory: Path, attempt: int, rank: int, first_rank: int) -> str:
    """Return what the rank wrote to stderr, if that did not go to the terminal. Torch counts from 0 on each host."""
    lines: list[str] = []
    for path in logs_of(directory).glob(f"*/attempt_{attempt}/{rank - first_rank}/stderr.log"):
        lines += path.read_text(errors="replace").splitlines()
    if not lines:
        return ""
    return f"last lines that rank {rank} wrote to stderr:\n" + "".join(f"  {line}\n" for line in lines[-OUTPUT_LINES:])
