"""The benchmark of latency at toy size: every case has figures, and a table shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from benchmarks import collectives_latency, mpi


def test_a_table_shows_median_and_percentile() -> None:
    times = {"shardwise": [2.0, 4.0], "gloo": [20.0, 40.0]}
    row = {"operation": "all_reduce", "ranks": 2, "bytes": 8, "ratio_to_gloo": 10.0, "ratio_to_mpi": 1.5}
    measured = collectives_latency.render([row | {"microseconds": times | {"mpi": [3.0, 6000.0]}}])
    assert [column.header for column in measured.columns][3:5] == ["shardwise, median", "shardwise, p99"]
    assert cells(measured) == ["all_reduce", "2", "8", "2", "4", "20", "40", "3", "6,000", "10.0", "1.5"]
    without = collectives_latency.render([row | {"microseconds": times, "ratio_to_mpi": None}])
    assert cells(without)[7:] == ["not installed", "not installed", "10.0", "not installed"]


def cells(table: Table) -> list[Any]:
    return [next(iter(column.cells)) for column in table.columns]


def test_a_step_is_compared_with_what_is_asked() -> None:
    row = {"operation": "DDP step", "ranks": 4, "ratio_to_gloo": 1.25}
    assert collectives_latency.against_aim(row) == (
        "DDP step on 4 ranks: 1.25 times Gloo's speed; 1.3 is asked: missed"
    )


@pytest.mark.slow
@pytest.mark.parametrize("has_mpi", [False, True])
def test_every_case_is_measured(
    has_mpi: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if has_mpi and not mpi.is_installed():
        pytest.skip("Open MPI or mpi4py is not installed")
    monkeypatch.setattr(mpi, "is_installed", lambda: has_mpi)
    path = tmp_path / "latency.json"
    words = ["--rounds", "1", "--seconds", "1", "--ranks", "2", "--sizes", "8", "4096", "--json", str(path)]
    assert collectives_latency.main(words) == 0
    assert "DDP step on 2 ranks: " in capfd.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * len(collectives_latency.OPERATIONS) + 2
    assert all(row["ratio_to_gloo"] > 0 and set(row["microseconds"]) >= {"shardwise", "gloo"} for row in rows)
    by_mpi = [row["operation"] for row in rows if "mpi" in row["microseconds"]]
    assert len(by_mpi) == (len(rows) - 1) * has_mpi and "DDP step" not in by_mpi
