"""A launcher's answer to SIGTERM, SIGUSR1 and SIGHUP: its workers get them too, write a checkpoint and end.

Torch's elastic agent would end the workers instead. A second SIGTERM does that, if it comes late enough not to be the
first one on another way (see `shardwise.launch.interrupt`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from shardwise.launch.interrupt import SAME_REQUEST_SECONDS, heeded_signals


class Forwarding:
    """The signals that this process got and its workers are to have. `received` holds each of them once."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._sent = 0  # how many of `received` the workers have
        self._terminated: float | None = None  # when the first SIGTERM came

    def send(self, pids: list[int]) -> None:
        """Pass on what came since the last call. `pids` are children that nobody has waited for, so they are there."""
        while self._sent < len(self.received):
            for pid in pids:
                os.kill(pid, self.received[self._sent])
            self._sent += 1

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler. It does not send: the workers of this moment may not have been started."""
        if number == signal.SIGTERM:
            if self._terminated is None:
                self._terminated = time.monotonic()
            elif time.monotonic() - self._terminated >= SAME_REQUEST_SECONDS:
                raise SignalException("second SIGTERM", signal.SIGTERM)  # as torch's own handler does at the first
        if number not in self.received:
            self.received.append(signal.Signals(number))


@contextmanager
def forwarding(signals: Forwarding | None = None) -> Iterator[Forwarding]:
    """Takes these signals meanwhile, into `signals` where they are given.

    Outside of the main thread, where Python takes no handlers, nothing changes.
    """
    signals = signals or Forwarding()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.note) for number in heeded_signals()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: a handler not of Python's
