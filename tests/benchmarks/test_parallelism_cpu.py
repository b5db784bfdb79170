"""The benchmark of the axes at toy size: every contender of an axis runs, and their losses agree."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parallelism_cpu, smp_step

TOY = ["--layers", "4", "--width", "32", "--heads", "4", "--vocabulary", "128", "--sequence", "16", "--batch", "4",
       "--rounds", "2", "--steps", "1", "--warmup", "1", "--bubble-rounds", "0"]  # fmt: skip


def test_every_axis_has_a_step_of_ours_and_a_peer() -> None:
    from benchmarks import parallelism_peers
    from benchmarks.contenders import shardwise_contender

    for axis in parallelism_cpu.AXES.values():
        assert hasattr(shardwise_contender, axis.ours.build.partition(":")[2])
        assert axis.peers and all(hasattr(parallelism_peers, peer.build.partition(":")[2]) for peer in axis.peers)


def run(axis: str, **more: Any) -> dict[str, Any]:
    rows = [{"contender": "shardwise", "first_loss": 5.0, "last_loss": 4.0}, {"contender": "torch", **more}]
    return {"axis": axis, "rows": rows}


def test_what_makes_numbers_unusable_is_said() -> None:
    assert parallelism_cpu.check(run("tensor", first_loss=5.00001, last_loss=4.001)) == []
    assert "first_loss disagrees" in parallelism_cpu.check(run("tensor", first_loss=5.1, last_loss=4.0))[0]
    assert "last_loss disagrees" in parallelism_cpu.check(run("tensor", first_loss=5.0, last_loss=4.1))[0]
    assert parallelism_cpu.check(run("tensor", skipped="no\nmemory")) == ["tensor: torch did not run: memory"]


@pytest.mark.slow
def test_a_script_of_smp_beside_the_engine(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    assert smp_step.main([*TOY, "--json", str(target)]) == 0
    runs = json.loads(target.read_text())["runs"]
    assert [run["backend"] for run in runs] == ["gloo", "shardwise"]
    for rows in (run["rows"] for run in runs):
        assert [row["contender"] for row in rows] == ["shardwise", "smp script"]
        assert rows[0]["last_loss"] == pytest.approx(rows[1]["last_loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["pipeline", "tensor", "context", "shard"])
def test_an_axis_at_toy_size(tmp_path: Path, axis: str) -> None:
    target = tmp_path / "result.json"
    code = parallelism_cpu.main(["--axes", axis, *TOY, "--json", str(target)])
    found = json.loads(target.read_text())["runs"][0]
    ran = {row["contender"]: row for row in found["rows"] if "skipped" not in row}
    assert len(ran) >= 2 and ran["shardwise"]["shardwise_ratio"]["median"] == 1.0
    assert all(len(row) == 7 and row["seconds_per_step"]["median"] > 0 for row in ran.values())
    assert code == 0 or importlib.util.find_spec("accelerate") is None  # which transformers' own asks for
