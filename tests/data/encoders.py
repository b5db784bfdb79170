"""An encoder for the tests of parts, in a file that a process which tokenizes imports quickly."""

from __future__ import annotations

import os
import signal

import numpy as np

from shardwise.errors import DataError


def lengths(group: list[str]) -> list[np.ndarray]:
    """Return the length of each text; `stop` ends the process, `wrong` is refused."""
    if "stop" in group:
        os.kill(os.getpid(), signal.SIGKILL)
    if "wrong" in group:
        raise DataError("row 7 is wrong")
    return [np.array([len(text) for text in group])]
