"""The record of a launch in its directory, so that a job is submitted once and `shardwise jobs` finds it.

`launch.json` says what was written; `submitted.json` that it was submitted, and under which name. The second is made
before the client is called, by the one process that may: a submit that ends half-way leaves it behind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError, OutputError
from shardwise.words import nearest_file

RECORD_FILE = "launch.json"
SUBMITTED_FILE = "submitted.json"


@dataclass(frozen=True)
class LaunchRecord:
    """A launch that was written, read back.

    Attributes:
        directory: where its files lie.
        target, name: where to, and of what name.
        details: what the target's client needs beside them.
        identifier: the cluster's own name of the job; empty before it was submitted, or where that is not known.
        state: `written`, `submitting` (begun, and its end not known) or `submitted`.
    """

    directory: Path
    target: str
    name: str
    details: Mapping[str, Any] = field(default_factory=dict)
    identifier: str = ""
    state: str = "written"


def record_text(target: str, name: str, details: Mapping[str, Any]) -> str:
    """Return the text of `launch.json`."""
    return json.dumps({"target": target, "name": name, "details": dict(details)}, indent=1, sort_keys=True) + "\n"


def read_record(directory: Path) -> LaunchRecord:
    """Return the record of a launch.

    Raises:
        OutputError: the directory holds none, or one that cannot be read.
    """
    try:
        data = json.loads((directory / RECORD_FILE).read_text(encoding="utf-8"))
        submitted = directory / SUBMITTED_FILE
        state = json.loads(submitted.read_text(encoding="utf-8") or "{}") if submitted.exists() else None
        record = LaunchRecord(directory, data["target"], data["name"], data["details"])
        identifier = "" if state is None else state.get("id", "")
    except FileNotFoundError:
        hint = "" if directory.is_dir() else nearest_file(directory)
        raise OutputError(
            f"{str(directory)!r} holds no launch; give a directory that `shardwise launch` wrote.{hint}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OutputError(
            f"{directory / RECORD_FILE} cannot be read: {error!r}; launch into another directory"
        ) from None
    if state is None:
        return record
    return LaunchRecord(
        directory, record.target, record.name, record.details, identifier, "submitted" if identifier else "submitting"
    )


def claim_submit(record: LaunchRecord) -> None:
    """Note that a submit begins.

    Raises:
        LaunchError: there was one before, which nobody shall do again.
    """
    try:
        with (record.directory / SUBMITTED_FILE).open("x", encoding="utf-8") as file:
            file.write("{}\n")
    except FileExistsError:
        before = read_record(record.directory)
        done = f"was submitted as {before.identifier}" if before.identifier else "has a submit whose end is not known"
        raise LaunchError(
            f"{str(record.directory)!r} {done}; nothing is submitted twice. See `shardwise jobs status "
            f"{record.directory}`; to start it once more, give another --output and --launch.name"
        ) from None
    except OSError as error:
        raise OutputError(f"{record.directory / SUBMITTED_FILE}: {error.strerror}; nothing was submitted") from None


def note_submitted(record: LaunchRecord, identifier: str) -> None:
    """Note the cluster's own name of a job that was submitted."""
    (record.directory / SUBMITTED_FILE).write_text(json.dumps({"id": identifier}) + "\n", encoding="utf-8")


def give_up_submit(record: LaunchRecord) -> None:
    """Note that a submit left nothing behind, so that it may be tried again."""
    (record.directory / SUBMITTED_FILE).unlink(missing_ok=True)
