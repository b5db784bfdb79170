"""The benchmark of latency at toy size: every case has figures, and a table shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import collectives_latency


def test_a_table_shows_median_and_percentile() -> None:
    times = {"shardwise": [2.0, 4.0], "gloo": [20.0, 40.0]}
    row = {"operation": "all_reduce", "ranks": 2, "bytes": 8, "microseconds": times, "ratio_to_gloo": 10.0}
    table = collectives_latency.render([row])
    assert [column.header for column in table.columns][3:5] == ["shardwise, median", "shardwise, p99"]
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["all_reduce", "2", "8", "2", "4", "20", "40", "10.0"]


def test_a_step_is_compared_with_what_is_asked() -> None:
    row = {"operation": "DDP step", "ranks": 4, "ratio_to_gloo": 1.25}
    assert collectives_latency.against_aim(row) == (
        "DDP step on 4 ranks: 1.25 times Gloo's speed; 1.3 is asked: missed"
    )


@pytest.mark.slow
def test_every_case_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collectives_latency, "SIZES", (8, 4096))
    path = tmp_path / "latency.json"
    assert collectives_latency.main(["--rounds", "1", "--seconds", "1", "--ranks", "2", "--json", str(path)]) == 0
    assert "DDP step on 2 ranks: " in capfd.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * len(collectives_latency.OPERATIONS) + 2
    assert all(row["ratio_to_gloo"] > 0 and set(row["microseconds"]) >= {"shardwise", "gloo"} for row in rows)
