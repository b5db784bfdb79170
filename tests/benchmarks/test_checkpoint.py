"""The checkpoint benchmark at toy size: every contender runs, and one that loses data is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import checkpoint
from benchmarks.checkpoint_contenders import Raw

TOY = ["--layers", "1", "--width", "32", "--vocabulary", "64", "--steps", "4"]


class Forgetful(Raw):
    """Brings back all but the last element of one tensor, on one rank."""

    def load(self, path: Path) -> None:
        super().load(path)
        if torch.distributed.get_rank() == 1:
            list(self.state.locals.values())[3].view(-1)[-1] += 1


def run(tmp_path: Path, rounds: int) -> tuple[int, dict[str, Any]]:
    where, target = tmp_path / "written", tmp_path / "result.json"
    where.mkdir()
    code = checkpoint.main([*TOY, "--rounds", str(rounds), "--directory", str(where), "--json", str(target)])
    assert not list(where.iterdir())
    return code, json.loads(target.read_text())


@pytest.mark.slow  # eleven kinds of checkpoint; the next test runs two
def test_every_contender_brings_the_state_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(tmp_path, rounds=2)
    assert (code, found["problems"]) == (0, [])
    rows = {row["contender"]: row for row in found["rows"]}
    assert rows.keys() == {*checkpoint.CONTENDERS, checkpoint.PLAIN}
    for name in set(checkpoint.CONTENDERS) - {checkpoint.HALF, checkpoint.FLOOR}:
        assert len(rows[name]["seconds"]["save"]) == len(rows[name]["seconds"]["load"]) == 2
    for name in (checkpoint.OURS, checkpoint.HALF, checkpoint.FLOOR):
        assert len(rows[name]["seconds"][checkpoint.ASYNCHRONOUS]) == 2
    assert rows[checkpoint.OURS]["save_ratio"]["median"] == 1.0
    assert rows[checkpoint.OURS]["staged"] <= rows[checkpoint.OURS]["budget"]
    printed = capsys.readouterr().out
    assert "DCP, threads" in printed and "Seconds that a save adds" in printed


@pytest.mark.slow
def test_a_contender_that_loses_data_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = {checkpoint.OURS: checkpoint.CONTENDERS[checkpoint.OURS], "forgetful": f"{__name__}:Forgetful"}
    monkeypatch.setattr(checkpoint, "CONTENDERS", contenders)
    code, found = run(tmp_path, rounds=1)
    assert code == 1
    assert all(problem.startswith("rank 1: forgetful") for problem in found["problems"])
    assert len(found["problems"]) == 1


def result_of(size: int, held: float, staged: int) -> dict[str, Any]:
    save, load = [1.0, 2.0], [0.5, 0.5]
    ours = {
        "save": save,
        "load": load,
        checkpoint.AMID: [4.0, 5.0],
        checkpoint.ASYNCHRONOUS: [2.5, 2.5],
        "held": [held] * 2,
    }
    return {
        "bytes": size, "copy": 0.25, "problems": [],
        "times": {checkpoint.OURS: ours, "DCP": {"save": [2.0, 3.0], "load": [0.25, 0.25]},
                  checkpoint.LIMIT: {"save": [0.5, 0.5], "load": load},
                  checkpoint.PLAIN: {checkpoint.AMID: [2.0, 2.0]}},
        "memory": {checkpoint.OURS: {"save": 10, "asynchronous": 20}, "DCP": {}, checkpoint.LIMIT: {}},
        "rings": {checkpoint.OURS: (staged + 5, staged)},
    }  # fmt: skip


def test_the_numbers_of_the_tables() -> None:
    """Of times the slowest rank's; ratios within each round; the closed form from the speed of a save."""
    size = 3_000_000
    found = checkpoint.summarize_run([result_of(size, 0.1, 1_500_000), result_of(size, 0.3, 1_500_000)], steps=20)
    ours, dcp, limit, _ = found["rows"]
    assert ours["save"]["median"] == pytest.approx((6.0 + 3.0) / 2)
    assert dcp["save_ratio"]["median"] == pytest.approx((2.0 + 1.5) / 2)
    assert dcp["load_ratio"]["median"] == 0.5
    assert ours[checkpoint.AMID]["median"] == 2.5 and ours[checkpoint.ASYNCHRONOUS]["median"] == 0.5
    assert ours["of_synchronous"] == 0.2 and ours["held"]["median"] == 0.3
    speed, budget = size / 1.5, 1_500_005
    rest = size - speed * 2.0 / 20  # a step takes a tenth of a second
    assert ours["predicted"] == pytest.approx(0.25 * budget / size + (rest - budget) / speed)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(checkpoint.render_speed(found), checkpoint.render_stall(found))
    assert "1.75 (1.62-1.88)" in capture.get() and "0.775" in capture.get() and limit["save"]["median"] == 12.0
