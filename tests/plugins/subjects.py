"""A line for each folder of tests: how many passed, failed and were skipped, and their processor time."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import PurePosixPath

import pytest

from tests.plugins.processor_time import processor_seconds

OUTCOMES = ("passed", "failed", "skipped")


class Subjects:
    """Count the outcomes of tests by folder, and show them after a run of slow tests or with `--processor-times`."""

    def __init__(self, config: pytest.Config) -> None:
        self._shown = config.getoption("--processor-times") or config.getoption("markexpr") == "slow"
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        subject = _subject(report.nodeid)
        self._seconds[subject] += processor_seconds(report)
        if report.when == "call" or report.outcome != "passed":  # also what a fixture skips or fails
            self._outcomes[subject][report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._shown or not self._outcomes:
            return
        terminalreporter.section("tests by subject")
        terminalreporter.line("".join(f"{title:>9}" for title in (*OUTCOMES, "cpu s")) + "  subject")
        for subject, counts in sorted(self._outcomes.items()):
            numbers = "".join(f"{counts[outcome]:9d}" for outcome in OUTCOMES)
            terminalreporter.line(f"{numbers}{self._seconds[subject]:9.0f}  {subject}")


def _subject(test: str) -> str:
    """Return the folder under tests/ that the test is in; `tests` for those in none."""
    parts = PurePosixPath(test.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else parts[0]
