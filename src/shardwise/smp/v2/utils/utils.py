"""Timing for scripts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.smp.v2.logger import get_logger


@contextmanager
def timeit(enabled: bool = True, message: str = "", rank: int = 0) -> Iterator[None]:
    """Log how long the block took, in seconds, where `enabled` on the rank numbered 0."""
    start = time.perf_counter()
    yield
    if enabled and rank == 0:
        get_logger().info("%s took %.3f s", message, time.perf_counter() - start)
