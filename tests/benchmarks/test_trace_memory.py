"""The benchmarks of the trace beside the closed forms: draws, whose bytes, and one real row of each."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import trace_memory, trace_time
from benchmarks.trace_jobs import drawn_job, is_wanted
from shardwise.errors import LegalityError

TABLES = Path(__file__).parents[1] / "data" / "perf-tables"


def test_the_rank_that_departs_most_counts() -> None:
    ranks = [{"rank": 0, "error": 0.01}, {"rank": 8, "error": -0.04}, {"rank": 16, "error": 0.03}]
    row: dict[str, Any] = {"number": 3, "job": "a job", "ranks": ranks, "seconds": {"closed_form": 2.0, "traced": 1.6}}
    assert trace_memory.line(row) == "3: a job: rank 8 -4.0% of memory; +25.0% of time"


@pytest.mark.slow
def test_a_job_is_a_function_of_seed_and_number() -> None:
    first, again = drawn_job(1, 2), drawn_job(1, 2)
    assert first.settings == again.settings and first.settings != drawn_job(2, 2).settings
    assert is_wanted(first) and first.cluster.size >= 8


@pytest.mark.slow
def test_a_row_of_memory(tmp_path: Path) -> None:
    record = tmp_path / "result.json"
    assert trace_memory.main(["--numbers", "0", "--processes", "1", "--json", str(record)]) == 0
    (row,) = json.loads(record.read_text())["rows"]
    for rank in row["ranks"]:
        assert abs(rank["error"]) < 0.08
        assert sum(rank["by_owner"].values()) == pytest.approx(rank["closed_form"] - rank["traced"], abs=1.0)


def test_a_row_that_is_no_job_of_ours_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(job: trace_time.RowJob) -> None:
        raise LegalityError("degrees: they do not fit")

    monkeypatch.setattr(trace_time, "_traced_row", refused)
    row = trace_time.row_of(SimpleNamespace(name="a table 16"))  # type: ignore[arg-type]
    assert trace_time.line(row) == "a table 16: not a job of ours: degrees: they do not fit"
    table = trace_time.render([row], SimpleNamespace(seed=1))  # type: ignore[arg-type]
    assert table.row_count == 0


@pytest.mark.slow
def test_a_row_of_time(tmp_path: Path) -> None:
    record = tmp_path / "result.json"
    assert trace_time.main([str(TABLES / "megatron_sequence_parallel_a100.csv")]) == 2
    table = str(TABLES / "fms_fsdp.csv")
    assert trace_time.main([table, "--rows", "1", "--processes", "1", "--json", str(record)]) == 0
    (row,) = json.loads(record.read_text())["rows"]
    assert row["traced"] > 0 and row["error"] == pytest.approx(row["closed_form"] / row["traced"] - 1)
