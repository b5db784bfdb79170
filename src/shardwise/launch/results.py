"""Pipes over which results come back from local workers, so that no lock between processes is needed.

Elastic takes a `SimpleQueue` for each worker's result and an `Event` that tells all that theirs were read. Python's own
need semaphores, which are files of `/dev/shm`: where that cannot be written, no worker would start. One writer and one
reader need none.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

_STARTING = threading.Lock()  # the context is one of the process, whose threads may each launch workers


class ResultPipe:
    """Holds what one worker returns until the launcher reads it; stands for a `SimpleQueue`."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)

    def put(self, result: Any) -> None:
        """Send a result that can be pickled."""
        self._writer.send(result)

    def empty(self) -> bool:
        """Return True if there is nothing to read."""
        return not self._reader.poll()

    def get(self) -> Any:
        """Return the result; waits for it."""
        return self._reader.recv()


class ReadNotice:
    """Tells all workers at once that their results were read; stands for an `Event`. Workers get the reading end."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)

    def __getstate__(self) -> Connection:
        return self._reader

    def __setstate__(self, reader: Connection) -> None:
        self._reader = reader

    def set(self) -> None:
        """Release all that wait. So does the end of this process."""
        self._writer.send_bytes(b"read")

    def wait(self) -> None:
        """Wait for `set`. What it has written stays in the pipe, where all see it."""
        self._reader.poll(None)


@contextmanager
def results_over_pipes() -> Iterator[None]:
    """Let elastic, which starts workers meanwhile, take these where it asks for a queue and an event."""
    context: Any = multiprocessing.get_context("spawn")
    with _STARTING:
        context.SimpleQueue, context.Event = ResultPipe, ReadNotice  # of this object, not of its class
        try:
            yield
        finally:
            del context.SimpleQueue, context.Event
