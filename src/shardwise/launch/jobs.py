"""States, logs and ends of launched jobs, asked for through the client of each one's target."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from shardwise.errors import LaunchError, OutputError
from shardwise.launch.launcher import find_target
from shardwise.launch.record import RECORD_FILE, LaunchRecord, read_record


def launch_table(directory: Path) -> Table:
    """Return the launches in a directory and in those right below it, each with its state.

    Raises:
        OutputError: there are none.
    """
    places = sorted(file.parent for pattern in (RECORD_FILE, f"*/{RECORD_FILE}") for file in directory.glob(pattern))
    if not places:
        raise OutputError(f"{str(directory)!r} holds no launch, nor do the directories in it; give another one")
    table = Table("directory", "name", "target", "submitted as", "state")
    for place in places:
        try:
            record = read_record(place)
        except OutputError as error:
            table.add_row(str(place), "", "", "", str(error))
        else:
            table.add_row(str(place), record.name, record.target, record.identifier, _state(record))
    return table


def job_status(directory: Path) -> str:
    """Return the state of a launched job in the cluster's own word.

    Raises:
        LaunchError: the client is missing, or does not know the job.
    """
    record = read_record(directory)
    if record.state == "written":
        return "written, not submitted"
    if record.state == "submitting" and not find_target(record.target).names_jobs:
        raise LaunchError(
            f"the end of the submit of {record.name} is not known; look for it with {record.target}'s client"
        )
    return find_target(record.target).status(record)


def job_logs(directory: Path) -> str:
    """Return what the ranks of a launched job have printed.

    Raises:
        LaunchError: the client is missing, or does not know the job.
    """
    record = _submitted(directory)
    return find_target(record.target).logs(record)


def stop_job(directory: Path) -> str:
    """Stop a launched job; returns what was stopped.

    Raises:
        LaunchError: the client is missing, or does not know the job.
    """
    record = _submitted(directory)
    find_target(record.target).stop(record)
    return f"stopped {record.identifier or record.name}"


def _submitted(directory: Path) -> LaunchRecord:
    record = read_record(directory)
    if record.state == "written":
        raise LaunchError(f"{record.name} was not submitted; `shardwise launch … --submit` does that")
    return record


def _state(record: LaunchRecord) -> str:
    try:
        return job_status(record.directory)
    except LaunchError as error:
        return f"not known: {error}"
