"""Waiting for a peer that may not have started yet."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

PAUSE = 0.2  # seconds between two attempts
ATTEMPT = 10.0  # seconds for one: a host that is not there yet may answer nothing


def reach(address: str, port: int, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> str | None:
    """Wait until somebody listens at an address; return why not where nobody does in time.

    `meanwhile` is called between two attempts.

    Torch would wait too, but logs a C++ stack whenever it tries.
    """
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=min(max(left, PAUSE), ATTEMPT)):
                return None
        except OSError as error:
            if left <= PAUSE:
                return f"{error.strerror or error}"
        meanwhile()
        time.sleep(PAUSE)
