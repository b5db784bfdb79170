"""A request to stop, as the operating system sends it: SIGTERM, SIGUSR1 and SIGHUP are noted until the step is done.

Schedulers announce the end of an allocation with a signal to one process or to all of them, which may be in the midst
of a collective. So a handler only notes the reason; the training loop reads it at the next step boundary, where all
ranks agree to write a checkpoint and to end.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

# `scancel --full`, `kill -- -GROUP` and `timeout` reach a launcher and its workers alike, and the launcher passes on
# what it got: one request arrives twice, a moment apart. Only a SIGTERM later than this is a second one.
SAME_REQUEST_SECONDS = 2.0
_REASON = re.compile(r"SIG[A-Z0-9]+ received by rank \d+")


def asked_by_signal(stopped: str | None) -> bool:
    """Return whether a signal was why a run ended before its last step (`TrainingResult.stopped`)."""
    return stopped is not None and _REASON.match(stopped) is not None


def heeded_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to stop. Under nohup a hang-up is ignored, and stays so."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (number == signal.SIGHUP and is_ignored)]


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Hold SIGINT back meanwhile, here and in the processes that are started until they call `take_interrupts`.

    A process that Python starts imports torch before it comes to code of ours, and would print where it was
    interrupted.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_interrupts() -> None:
    """Let SIGINT through, one that was held back too."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


class Interrupt:
    """While entered, `reason` says which signal asked this rank to stop, or is None.

    The launcher may ask too, by a file that it writes its reason into: a signal would end a rank that has left its
    steps meanwhile.

    A second SIGTERM ends the process as if there were no handler: whoever sends it does not want to wait for the
    checkpoint. Outside of the main thread, where Python takes no handlers, nothing is installed.

    The former handlers come back at the end, with one exception: after a request, the default action does not, since
    the same request arriving once more would end a process that is about to end well.
    """

    def __init__(self, rank: int, request_file: Path | None = None) -> None:
        self._signalled: str | None = None
        self._rank, self._request_file = rank, request_file
        self._terminated: float | None = None  # when the first SIGTERM came
        self._before: dict[signal.Signals, Any] = {}

    @property
    def reason(self) -> str | None:
        """Why this rank is to stop; None: it is not."""
        if self._signalled is not None or self._request_file is None or not self._request_file.exists():
            return self._signalled
        return self._request_file.read_text(encoding="utf-8")

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in heeded_signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if self._signalled is None or handler not in (signal.SIG_DFL, None):  # None: a handler not of Python's
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            if self._terminated is None:
                self._terminated = time.monotonic()
            elif time.monotonic() - self._terminated >= SAME_REQUEST_SECONDS:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
        if self._signalled is None:
            self._signalled = f"{signal.Signals(number).name} received by rank {self._rank}"
