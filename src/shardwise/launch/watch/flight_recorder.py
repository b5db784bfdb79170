"""The collective that a rank's GPU waits in: torch's flight recorder of NCCL, read in the rank's process.

A host thread that has started a collective on NCCL goes on, so the rank's record says too little there. The recorder
knows which collectives have been started and which have ended; the names that the rank has entered, by time, say whose
they are. A thread waits at a named pipe for the launcher's question and answers with a file. All of it is JSON.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise._torch_compat.groups import flight_record
from shardwise.collectives.rank_record import IssuedCollective, RankRecord

COMPLETED = "completed"


@dataclass(frozen=True)
class PendingCollective:
    """The oldest collective that a GPU has not ended: operation, group, number in it, and when it was issued (ns)."""

    operation: str
    group: str
    sequence: int
    created: int


def pending_collective(dump: Mapping[str, Any]) -> PendingCollective | None:
    """Return the oldest collective of a dump that has not ended; None where all have."""
    entries = [entry for entry in dump.get("entries", ()) if entry["state"] != COMPLETED]
    if not entries:
        return None
    oldest = min(entries, key=lambda entry: entry["record_id"])
    sequence = oldest["p2p_seq_id" if oldest.get("is_p2p") else "collective_seq_id"]
    operation = oldest["profiling_name"].rpartition(":")[2].lstrip("_")
    return PendingCollective(operation, oldest["process_group"][1], sequence, oldest["time_created_ns"])


def issued_name(pending: PendingCollective, issued: Sequence[IssuedCollective]) -> str:
    """Return the name under which a collective was issued; what the recorder says itself where there was none."""
    place = bisect_right(issued, pending.created, key=lambda one: one.entered) - 1
    if place >= 0 and issued[place].group == pending.group and pending.created <= issued[place].left:
        return issued[place].name
    return f"{pending.operation} {pending.sequence} of the group {pending.group}"


def answer_questions(pipe: Path, answer: Path, record: RankRecord) -> None:
    """Begin to answer the launcher, in a thread that waits without computing."""
    os.mkfifo(pipe, 0o600)
    record.keep_issued()
    threading.Thread(target=_serve, args=(pipe, answer, record), name="shardwise-flight", daemon=True).start()


def ask(pipe: Path) -> bool:
    """Ask a rank; returns whether somebody listens."""
    with suppress(OSError):  # there is no pipe, or no reader
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"?")
        finally:
            os.close(descriptor)
        return True
    return False


def _serve(pipe: Path, answer: Path, record: RankRecord) -> None:
    while True:
        try:
            with pipe.open("rb") as questions:
                questions.read()
            pending = pending_collective(flight_record())
            name = "" if pending is None else issued_name(pending, record.issued())
            partial = answer.with_suffix(".partial")
            partial.write_text(json.dumps({"collective": name, "created": pending.created if pending else 0}))
            partial.replace(answer)
        except FileNotFoundError:
            return  # the run's directory is gone
        except (OSError, ValueError, KeyError, RuntimeError):
            continue  # another torch's record; the question stays without an answer
