"""What torch's tests have come to on both backends, and why some pass on Gloo alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]  # outcome, why and seconds by test

CUSTOM = "the test tells a fake backend from another by torch's type of it, which is `custom` for both"
SEQUENCE = "torch refuses sequence numbers to backends whose type it does not know"
# By test, why it passes on Gloo alone. Ten at most.
REASONS = {
    "test_ddp_logging_data_cpu": "DDP's log names a backend by torch's type of it: `custom` where torch has none",
    "test_backend_override_argument_dict_with_idx_and_backend_eager": CUSTOM,
    "test_backend_override_argument_dict_with_idx_and_backend_lazy": CUSTOM,
    "test_sequence_num_set_default_pg_gloo": SEQUENCE,
    "test_sequence_num_set_gloo_new_group": SEQUENCE,
    "test_all_to_all_single": "Gloo refuses a transposed tensor, the engine exchanges it",
    "test_gloo_set_pg_timeout_api": "of a rank that has left the engine says so, before the timeout",
    "test_long": "torch's log of collectives says `shardwise:all_reduce` where the test wants `gloo:all_reduce`",
}


def read_results(path: Path) -> Results:
    """Read what a worker has written, a line a test."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row.pop("test"): row for row in map(json.loads, lines)}


@dataclass(frozen=True)
class Comparison:
    """Outcomes on Gloo and on the engine."""

    gloo: Results
    engine: Results

    @property
    def gloo_alone(self) -> list[str]:
        return [test for test in self.gloo if self._passes(self.gloo, test) and not self._passes(self.engine, test)]

    @property
    def engine_alone(self) -> list[str]:
        return [test for test in self.engine if self._passes(self.engine, test) and not self._passes(self.gloo, test)]

    @property
    def both(self) -> list[str]:
        return [test for test in self.gloo if self._passes(self.gloo, test) and self._passes(self.engine, test)]

    @property
    def unexplained(self) -> list[str]:
        return [test for test in self.gloo_alone if _method(test) not in REASONS]

    def table(self) -> str:
        """Return counts, and each test that passes on one backend alone, in Markdown."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        outcomes = Counter(each["outcome"] for each in self.gloo.values())
        yield f"{len(self.gloo)} tests on Gloo: {outcomes['passed']} pass, {outcomes['skipped']} skip themselves, "
        yield f"{outcomes['failed']} fail. {len(self.both)} pass on both, {len(self.gloo_alone)} on Gloo alone, "
        yield f"{len(self.engine_alone)} on the engine alone."
        yield from ("", "| passes on | test | reason |", "| --- | --- | --- |")
        for test in self.gloo_alone:
            other = self.engine.get(test, {"outcome": "did not run", "why": ""})
            yield f"| Gloo | `{test}` | {REASONS.get(_method(test)) or _last_words(other)} |"
        for test in self.engine_alone:
            other = self.gloo.get(test, {"outcome": "did not run", "why": ""})
            yield f"| engine | `{test}` | {_last_words(other)} |"

    @staticmethod
    def _passes(results: Results, test: str) -> bool:
        return results.get(test, {}).get("outcome") == "passed"


def _method(test: str) -> str:
    return test.rpartition(".")[2]


def _last_words(result: dict[str, Any]) -> str:
    """The line of an error that says what it is."""
    lines = [line.strip() for line in result["why"].splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line or "Timed out" in line or "timed out" in line]
    return f"{result['outcome']}: {(said or lines or ['no reason'])[-1][:200]}".replace("|", "/")
