"""What benchmarks change on the machine itself (networks, disks) and must put back whatever happens."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class MachineError(RuntimeError):
    """The machine cannot be changed so."""


def do(*command: str) -> str:
    """What the command prints.

    Raises:
        MachineError: it failed; its own words are in the message.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MachineError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


@contextmanager
def cleaning_up_when_terminated() -> Iterator[None]:
    """SIGTERM leaves by an exception inside, so that what `finally` puts back is put back; from the main thread."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
