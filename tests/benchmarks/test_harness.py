"""Worker groups, rounds and statistics of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from benchmarks import harness
from benchmarks.harness import GroupFailed, Series, WorkerGroup, paired_ratio, run_rounds, start_groups, summarize
from benchmarks.record import header, write_json
from tests.benchmarks.toys import toy


def start(names: list[str]) -> tuple[dict[str, WorkerGroup], list[Series]]:
    return start_groups([toy(name) for name in names], (1.0, Path()), 2, 1, lambda text: None)


def pids(groups: dict[str, WorkerGroup]) -> list[int]:
    return [process.pid for group in groups.values() for process in group.processes]


@pytest.mark.slow
def test_rounds_interleave_and_failures_stay_with_their_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "START_METHOD", "forkserver")  # six imports of torch less
    groups, series = start(["slow", "raising", "dying"])
    started, rounds = pids(groups), []
    try:
        assert list(groups) == ["slow", "dying"]
        assert "planted: rank 1 cannot be built" in (series[1].skipped or "")
        run_rounds(groups, series, warmup=1, rounds=3, steps=2, between=rounds.append)
        with pytest.raises(GroupFailed, match=r"ranks \[0, 1\] did not answer"):
            groups["slow"].run(20, timeout=0.5)
    finally:
        for group in groups.values():
            group.close()
    assert rounds == [0, 1, 2]
    assert len(series[0].cpu_seconds) == len(series[0].seconds) == 3
    assert min(series[0].seconds) >= 0.2  # the slowest rank counts: rank 0 alone would need no time
    assert series[0].losses == [1.5, 3.5, 5.5, 7.5, 9.5, 11.5, 13.5]  # 1 + 3 x 2 steps, each the mean of both ranks
    assert "exit code 7" in (series[2].skipped or "") and "planted: last words" in (series[2].skipped or "")
    assert not series[2].seconds
    assert series[0].idle_seconds > 0  # while the one that died took its turn
    assert not [pid for pid in started if psutil.pid_exists(pid)]


def test_a_package_that_is_missing_is_a_reason() -> None:
    assert toy("counting", "no_such_package").missing() == "no_such_package is not installed"
    assert toy("counting").missing() is None


def test_statistics() -> None:
    summary = summarize([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (summary.low, summary.median, summary.high) == (2.0, 3.0, 4.0)
    assert summarize([2.0]).high == 2.0
    ratio = paired_ratio([1.0, 10.0, 2.0], [2.0, 20.0, 3.0])  # a slow round hits both sides
    assert ratio.median == 2.0
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_record(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_json(path, header(["torch", "no-such-package"]))
    content = json.loads(path.read_text())
    assert content["versions"].keys() == {"torch"}
    assert content["machine"]["cores"] >= 1 and content["commit"]
    assert [item.name for item in path.parent.iterdir()] == ["result.json"]
