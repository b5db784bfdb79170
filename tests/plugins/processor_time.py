"""Processor time of every test: what it and all processes below the session used, in seconds of user and system time.

Wall time says little on a machine that others use too. A default test has a budget of processor time; the summary
names those over it, and `--processor-times` adds a table by file. Live processes are read from /proc, so that workers
of the pool and processes that outlive a test count where they worked.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUDGET = 3.0  # seconds of processor time for the call of a default test
PROPERTY = "processor_seconds"
TICK = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


class ProcessTree:
    """This process and all that descend from it."""

    def __init__(self) -> None:
        self._members = {os.getpid()}
        self._strangers: set[int] = set()

    def seconds(self) -> float:
        """Return the processor time of the living members and of the dead whose parents have waited for them."""
        if not PROC.is_dir():
            return sum(os.times()[:4])
        living = {int(name) for name in os.listdir(PROC) if name.isdecimal()}
        self._members &= living
        self._strangers &= living
        fields = {pid: _status_fields(pid) for pid in living - self._strangers}
        parents = {pid: int(values[1]) for pid, values in fields.items() if values}
        grew = True
        while grew:
            joined = {pid for pid, parent in parents.items() if parent in self._members} - self._members
            self._members |= joined
            grew = bool(joined)
        self._strangers |= living - self._members
        return sum(sum(map(int, fields[pid][11:15])) / TICK for pid in self._members if fields.get(pid))


def _status_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name: state, parent, …, user, system, waited user, waited system time."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


class ProcessorTimes:
    """Measure each phase of each test, and show the tests over budget when the session ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._tree = ProcessTree()
        self._last = self._tree.seconds()
        self._with_table = config.getoption("--processor-times")
        self._all_are_slow = "not slow" not in (config.getoption("markexpr") or "")
        self._calls: dict[str, float] = defaultdict(float)
        self._files: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        outcome: Any = yield
        now = self._tree.seconds()
        # A process that its parent left to others takes its time away with it.
        outcome.get_result().user_properties.append((PROPERTY, max(0.0, now - self._last)))
        self._last = now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = processor_seconds(report)
        self._files[report.nodeid.partition("::")[0]] += seconds
        if report.when == "call":
            self._calls[report.nodeid] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        over = {name: seconds for name, seconds in self._calls.items() if seconds > BUDGET}
        if self._with_table:
            terminalreporter.section("processor time by file, in seconds")
            for line in _table(self._files):
                terminalreporter.line(line)
        if over and (self._with_table or not self._all_are_slow):
            terminalreporter.section(f"tests over the budget of {BUDGET:g} s of processor time")
            for line in _table(over):
                terminalreporter.line(line)


def processor_seconds(report: pytest.TestReport) -> float:
    """Return the processor time of a phase of a test, as its report brings it from the process that has run it."""
    return sum(float(str(value)) for name, value in report.user_properties if name == PROPERTY)


def _table(seconds: dict[str, float]) -> list[str]:
    rows = sorted(seconds.items(), key=lambda row: -row[1])
    return [f"{value:8.1f}  {name}" for name, value in [*rows, ("total", sum(seconds.values()))]]
