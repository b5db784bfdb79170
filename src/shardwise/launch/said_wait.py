"""A wait for other hosts that is said: for whom, since when, and for how long at most."""

from __future__ import annotations

import sys
import time

from shardwise.launch.hosts import HostEnvironment

FIRST_WORD_SECONDS = 30.0  # after which a wait is said; hosts start that far apart


class SaidWait:
    """One wait of this host; said once it lasts, and again whenever it has doubled."""

    def __init__(self, host: HostEnvironment) -> None:
        self._host, self._began = host, time.monotonic()
        self._next_word = min(FIRST_WORD_SECONDS, host.join_seconds / 3)

    @property
    def left(self) -> float:
        """The seconds that are left of it."""
        return self._host.join_seconds - (time.monotonic() - self._began)

    def say(self, whom: str) -> None:
        """Say for whom this host waits, where it is time to."""
        waited = time.monotonic() - self._began
        if waited < self._next_word:
            return
        self._next_word = 2 * waited
        print(
            f"note: host {self._host.index} waits for {whom}: since {waited:.0f} s, for {self.left:.0f} s more at most "
            "(PET_RDZV_CONF=join_timeout=SECONDS says how long)",
            file=sys.stderr,
            flush=True,
        )
