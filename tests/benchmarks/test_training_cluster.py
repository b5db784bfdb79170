"""The cluster's training benchmark: its arithmetic, and one real run at toy size where namespaces can be made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import cluster, training_cluster
from benchmarks.contenders.shardwise_contender import AT_2, ON_ENGINE
from benchmarks.harness import Contender, Series
from benchmarks.peers import DEEPSPEED, FSDP2, FSDP2_AT_2

TOY = "--hosts 2 --layers 2 --width 32 --heads 2 --vocabulary 128 --sequence 16 --rounds 2 --steps 1 --warmup 1"


def series(contender: Contender, seconds: list[float], *losses: float) -> Series:
    return Series(contender, seconds, losses=list(losses or (5.0, 4.0)))


def test_communication_is_what_a_step_takes_beyond_computing_alone() -> None:
    entries = [
        series(training_cluster.ALONE, [2.0, 4.0], 5.0, 5.0),
        series(FSDP2, [10.0, 12.0]),
        series(DEEPSPEED, [8.0, 10.0]),
        series(FSDP2_AT_2, [6.0, 8.0]),
        series(ON_ENGINE, [4.0, 6.0]),
        series(AT_2, [3.0, 5.0]),
    ]
    rows: dict[str, dict[str, Any]] = {
        row["contender"]: row for row in training_cluster.summarize_run(entries, steps=2)
    }
    ours, at_2 = rows[ON_ENGINE.name], rows[AT_2.name]
    assert ours["seconds_per_step"]["median"] == 2.5 and ours["communication_seconds"]["median"] == 1.0
    assert ours["communication_share"] == 0.4
    assert (ours["best_rival"], at_2["best_rival"]) == (DEEPSPEED.name, FSDP2_AT_2.name)
    assert ours["step_ratio"] == pytest.approx((8 / 4 + 10 / 6) / 2)
    assert (ours["communication_ratio"], at_2["communication_ratio"]) == (pytest.approx(1 / 3), 0.25)
    assert "communication_seconds" not in rows["alone"] and "step_ratio" not in rows[FSDP2.name]
    assert training_cluster.check(entries) == []
    console = Console(width=160)
    with console.capture() as capture:
        console.print(training_cluster.render([*rows.values(), {"contender": "gone", "skipped": "not installed"}]))
    assert "2.50 (2.25 2.75)" in capture.get() and "not installed" in capture.get()


def test_losses_that_differ_are_a_problem() -> None:
    entries = [series(FSDP2, [1.0]), series(ON_ENGINE, [1.0], 5.0, 4.001), Series(FSDP2_AT_2, skipped="not installed")]
    [problem] = training_cluster.check(entries)
    assert problem.startswith("step 2: losses differ")


@pytest.mark.slow
@pytest.mark.skipif(bool(cluster.obstacle()), reason=cluster.obstacle() or "it can")
def test_a_toy_cluster_trains(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    contenders = ["--contenders", "alone", "fsdp2", "shardwise", "shardwise2", "--json", str(path)]
    assert training_cluster.main([*TOY.split(), *contenders]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["alone", FSDP2.name, ON_ENGINE.name, AT_2.name]
    assert all(len(row["rounds"]) == 2 and row["seconds_per_step"]["median"] > 0 for row in rows)
    assert len({round(row["first_loss"], 4) for row in rows}) == 1
    assert rows[2]["best_rival"] == FSDP2.name and rows[2]["last_loss"] < rows[2]["first_loss"]
