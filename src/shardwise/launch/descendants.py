"""The end of what workers have forked: a killed process has no say in what becomes of its children.

A process pool of a user's script, say, waits for work for ever, and holds the launcher's output open while it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess

import psutil


@contextmanager
def ended_too(pids: Iterable[int]) -> Iterator[None]:
    """Kills, after the body has ended the processes `pids`, those that came of them.

    Not those in a session of their own, as daemons are: they are meant to stay.
    """
    left = [process for pid in pids for process in _descendants(pid)]
    try:
        yield
    finally:
        for process in left:
            with suppress(psutil.NoSuchProcess):  # psutil compares start times, so a pid used again counts as gone
                process.kill()


def end_with(process: BaseProcess) -> None:
    """Lets the descendants of `process` end with it where code of others calls its `terminate`."""
    process.terminate = partial(_end_both, process, process.terminate)  # type: ignore[method-assign]


def _end_both(process: BaseProcess, terminate: Callable[[], None]) -> None:
    with ended_too([process.pid] if process.pid else []):
        terminate()


def _descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return [process for process in psutil.Process(pid).children(recursive=True) if _shares_our_session(process)]
    return []


def _shares_our_session(process: psutil.Process) -> bool:
    with suppress(ProcessLookupError):
        return os.getsid(process.pid) == os.getsid(0)
    return False
