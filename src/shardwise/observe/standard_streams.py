"""stdout and stderr that cannot end a run: closed, gone, or without some character of what is written."""

from __future__ import annotations

import contextlib
import io
import os
import sys

NUMBERS = {"stdout": 1, "stderr": 2}


def secure_streams() -> None:
    """Write characters that a stream's encoding lacks as escapes, and let closed streams take what is written."""
    for name in NUMBERS:
        stream = getattr(sys, name)
        if stream is None or stream.closed:  # the process was started with `>&-`
            _lead_to_nowhere(name)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush_or_leave(name: str) -> None:
    """Flush a stream; where its reader is gone, let nothing be left in it that would fail at exit."""
    try:
        getattr(sys, name).flush()
    except (OSError, ValueError):
        leave_stream(name)


def leave_stream(name: str) -> None:
    """Write no more to a stream whose reader or terminal is gone; what it holds goes nowhere."""
    with contextlib.suppress(OSError, ValueError):  # no stream of a file, as in a notebook
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, getattr(sys, name).fileno())
        os.close(nowhere)


def _lead_to_nowhere(name: str) -> None:
    """Open a stream for the rest of the process, under the number that the processes it starts look for."""
    number = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        if number != NUMBERS[name] and not _is_open(NUMBERS[name]):
            number = os.dup2(number, NUMBERS[name])
        os.set_inheritable(number, number == NUMBERS[name])
    setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
