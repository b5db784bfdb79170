"""Run tests of torch on one backend: `python -m tests.collectives.upstream.worker BACKEND RESULTS SOURCE [PART]`.

SOURCE is a test script of torch or `installed`. A line of JSON follows each test: its name, its outcome, why, and
seconds. With a PART only tests run whose name has it.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
import time
import unittest
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.collectives.upstream import adapted

REASON = 2000  # characters kept of why a test has failed: its end


class Outcome(unittest.TestResult):
    """Outcome of one test."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.why = "passed", ""

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.name, self.why = "failed", self._exc_info_to_string(err, test)[-REASON:]

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.name, self.why = "skipped", reason

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.name = "passed"


def main(backend: str, results: str, source: str, part: str = "") -> None:
    """Run what `source` has, on `backend`."""
    from shardwise.collectives import registration

    registration.register()
    adapted.prepare(backend)
    signal.signal(signal.SIGALRM, _fail_late_test)
    is_installed = source == "installed"
    module = adapted.load_installed(backend) if is_installed else adapted.load_script(Path(source), backend)
    tests = _tests(unittest.defaultTestLoader.loadTestsFromModule(module))
    chosen = [test for test in tests if part in _name(test)]
    with open(results, "a", buffering=1) as lines:
        for test_class, of_class in groupby(chosen, type):
            for test in of_class:
                lines.write(json.dumps({"test": _name(test)} | _run(test)) + "\n")
            test_class.tearDownClass()  # ends ranks that torch has started for all tests of a class


def _fail_late_test(number: int, frame: Any) -> None:
    raise TimeoutError(f"did not end within {2 * adapted.SECONDS} s")


def _name(test: unittest.TestCase) -> str:
    return ".".join(test.id().split(".")[-2:])


def _tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _tests(each)
        else:
            yield each


def _run(test: unittest.TestCase) -> dict[str, Any]:
    outcome, began = Outcome(), time.monotonic()
    signal.alarm(2 * adapted.SECONDS)  # torch waits without end for ranks that it has started for a class
    try:
        test.run(outcome)
    except TimeoutError as error:  # it came while unittest cleaned up
        outcome.name, outcome.why = "failed", str(error)
    signal.alarm(0)
    gc.collect()
    return {"outcome": outcome.name, "why": outcome.why, "seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    main(*sys.argv[1:])
