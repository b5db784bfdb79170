"""`shardwise inspect`: a line for each rank, a sentence on all, their stacks where they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.commands.cli import main
from shardwise.launch.watch import live, position
from shardwise.launch.watch.position import RankPosition

SAVING = RankPosition(0, "node0", 6, "", "save", "", "writing.py:12 in write", 94.0, ("write", "save"))
WAITING = RankPosition(1, "node0", 6, "", "forward", "all_gather of layers.7", "", 93.5, ("wait",), 41)


def test_ranks_of_a_live_run_have_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "live_ranks", lambda output, host: [object()] * 2)
    monkeypatch.setattr(position, "gather_positions", lambda ranks, launcher: [SAVING, WAITING])
    assert main(["inspect", str(tmp_path), "--stacks"]) == 0
    said = capsys.readouterr().out
    first, second = (line.split() for line in said.splitlines()[1:3])
    assert first[:4] == ["0", "7", "save", "–"] and first[-2:] == ["94.0", "s"]
    assert second[:3] == ["1", "7", "forward"] and "all_gather of layers.7 (call 41)" in " ".join(second)
    assert "is in save (writing.py:12 in write) since 94 s, rank 1 (node0) waits in all_gather of layers.7" in said
    assert "\n  write\n  save\nrank 1 on node0, step 7: " in said


def test_a_run_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "run")]) == 2
    assert "is no directory; give the output directory of a run" in capsys.readouterr().err


def test_ranks_that_start_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "live_ranks", lambda output, host: [])
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "the ranks are starting\n"
