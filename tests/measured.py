"""Line coverage of a pool's workers, kept while they work: a pool kills those of a run that has failed."""

from __future__ import annotations

import sys
import time

from shardwise.testing import world

SECONDS = 3.0  # between two times that a worker saves


def keep() -> None:
    """Initialize a worker of the pool: where coverage is measured, it saves what it has, between runs."""
    coverage = sys.modules.get("coverage")
    measurement = coverage and coverage.Coverage.current()
    if measurement is None:
        return
    leave, saved = world._leave, time.monotonic()

    def save_and_leave() -> None:
        nonlocal saved
        leave()
        if time.monotonic() > saved + SECONDS:
            measurement.save()
            saved = time.monotonic()

    world._leave = save_and_leave
