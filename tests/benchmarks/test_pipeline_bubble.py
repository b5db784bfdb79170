"""The benchmark of bubbles at toy size: every wait of a schedule is there, and idle time is what none fills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.pipeline_bubble import SCHEDULES, Wait, main, measured_bubble


def test_idle_time_is_what_no_wait_fills() -> None:
    """Two ranks, of which the second begins one late and the first ends one early."""
    ranks = [[Wait("forward", 0, 0.0, 1.0), Wait("backward", 0, 2.0, 3.0)], [Wait("forward", 1, 1.0, 4.0)]]
    assert measured_bubble(ranks) == pytest.approx(3 / 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["zbv", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES if name != "zbv")]
)
def test_a_schedule_at_toy_size(tmp_path: Path, schedule: str) -> None:
    target = tmp_path / "result.json"
    toy = ["--ranks", "2", "--microbatches", "4", "--rounds", "1", "--milliseconds", "1"]
    assert main([*toy, "--schedules", schedule, "--json", str(target)]) == 0
    (row,) = json.loads(target.read_text())["rows"]
    stages = 2 if "2 stages" in schedule or schedule in ("zbv", "dualpipev") else 1
    assert row["waits"] == 2 * stages * 4 * 3  # a forward and both halves of a backward of each microbatch and stage
    turns = stages * 4 * (1 if schedule.startswith(("simple", "interleaved")) else 3)
    assert row["formula"] == pytest.approx(1 / (turns + 1))
    assert 0 < row["measured"] < 1
