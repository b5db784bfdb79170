"""Waiting for a peer that may not have started yet."""

from __future__ import annotations

import socket
import time

PAUSE = 0.2  # seconds between two attempts


def reach(address: str, port: int, seconds: float) -> str | None:
    """Wait until somebody listens at an address; return why not where nobody does in time.

    Torch would wait too, but logs a C++ stack whenever it tries.
    """
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=max(left, PAUSE)):
                return None
        except OSError as error:
            if left <= PAUSE:
                return f"{error.strerror or error}"
        time.sleep(PAUSE)
