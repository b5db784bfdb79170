"""What a session of tests may not leave behind: processes, temporary files and directories, shared-memory segments.

The session gets a temporary directory of its own, and a mark in the environment that every process below it inherits,
orphans too. At its end nothing may be left in the one, no process may bear the other, and /dev/shm must hold no segment
that this session's processes have made. What is left is named, removed, and fails the session.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
import uuid
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

MARK = "SHARDWISE_TEST_SESSION"
PROC, SEGMENTS = Path("/proc"), Path("/dev/shm")
PATIENCE_SECONDS = 60.0  # for processes that end because this one has hung up
# Made once for many processes, and kept for them: torch's compiled kernels and what transformers and triton unpack.
KEPT = ("torchinductor_", "torchelastic_", "hf_", "triton")


class Leftovers:
    """Look for them when the session has ended. Workers of xdist are part of the session that has started them."""

    def __init__(self) -> None:
        self._mark = os.environ[MARK] = uuid.uuid4().hex
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps its last three there
        self._directory = Path(tempfile.mkdtemp(prefix="shardwise-tests-"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._directory)
        # After multiprocessing has removed its own directory, which has the priority -100.
        Finalize(None, shutil.rmtree, (self._directory, True), exitpriority=-200)
        self._segments = _names(SEGMENTS)
        self._found: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._found = [*self._processes(), *self._files(), *self._shared_memory()]
        if self._found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._found:
            terminalreporter.section("left behind by this session", red=True)
            for line in self._found:
                terminalreporter.line(line)

    def _processes(self) -> list[str]:
        """Name and kill the processes that bear the mark and are neither this one nor multiprocessing's servants."""
        end = time.monotonic() + PATIENCE_SECONDS
        while (marked := _marked(self._mark)) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in marked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"process {pid}: {command}" for pid, command in marked.items()]

    def _files(self) -> list[str]:
        left = [name for name in _names(self._directory) if not name.startswith(("pymp-", *KEPT))]
        return [f"temporary file or directory: {self._directory / name}" for name in left]

    def _shared_memory(self) -> list[str]:
        """Segments that have come meanwhile and that no living process has open: those are another session's."""
        return [f"shared memory: {SEGMENTS / name}" for name in _names(SEGMENTS) - self._segments if _is_orphan(name)]


def _names(directory: Path) -> set[str]:
    """Return the names in a directory, without semaphores, which multiprocessing's own tracker looks after."""
    names = os.listdir(directory) if directory.is_dir() else []
    return {name for name in names if not name.startswith("sem.")}


def _marked(mark: str) -> dict[int, str]:
    """Return the command lines of living processes that have the mark in their environment, by process id."""
    found: dict[int, str] = {}
    if not PROC.is_dir():
        return found
    for pid in (int(name) for name in os.listdir(PROC) if name.isdecimal() and int(name) != os.getpid()):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (PROC / str(pid) / "environ").read_bytes():
                command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                servants = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
                if not (any(name in command for name in servants) and _parent(pid) == os.getpid()):
                    found[pid] = command.strip()
    return found


def _parent(pid: int) -> int:
    return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def _is_orphan(segment: str) -> bool:
    for maps in PROC.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"{SEGMENTS}/{segment}" in maps.read_text():
                return False
    return True
