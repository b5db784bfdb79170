"""What `plan evaluate` and `plan calibrate` print and keep; their numbers are tests/planner's."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.commands import machine_probe, plan_accuracy
from shardwise.commands.cli import main
from shardwise.planner.constants.inventory import shipped
from shardwise.planner.formulas.local import MachineConstants, machine_constants
from shardwise.planner.published import calibrate

TABLE = Path("tests/data/perf-tables/sagemaker_smp_p4d.csv")
ROWS = 18


def changed_table(path: Path, change: Callable[[dict[str, str]], None]) -> str:
    """Write the table with each of its rows changed; returns its path."""
    with TABLE.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        change(row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_rows_are_printed_with_the_largest_errors_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_accuracy, "SHOWN", 3)
    assert main(["plan", "evaluate", str(TABLE)]) == 0
    name, head, *lines = capsys.readouterr().out.splitlines()
    assert name == TABLE.stem and head.split()[:3] == ["row", "model", "unit"]
    assert lines[3].strip() == f"the 3 largest errors of {ROWS} rows; --all shows every row"
    pairs = [[float(cell) for cell in line.split()[3:5]] for line in lines[:3]]
    errors = [round(abs(predicted / measured - 1), 3) for predicted, measured in pairs]  # of what is printed
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.3
    assert any("errors in per cent" in line for line in lines)


def test_all_rows_are_printed_as_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def forget_length(row: dict[str, str]) -> None:
        row["seq"] = "" if row["row"] == "0" else row["seq"]

    assert main(["plan", "evaluate", changed_table(tmp_path / "mine.csv", forget_length), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()[2 : 2 + ROWS]
    assert [line.split()[0] for line in lines] == [str(number) for number in range(ROWS)]
    assert "unmapped: " in lines[0] and "largest errors" not in "".join(lines)
    assert any("not scored" in line for line in lines)


def test_tables_of_one_name_are_all_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last one's rows were all that was counted."""
    (tmp_path / "other").mkdir()
    copy = changed_table(tmp_path / "other" / TABLE.name, lambda row: None)
    assert main(["plan", "evaluate", str(TABLE), copy, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["rows"]) == 2 * ROWS and {row["table"] for row in said["rows"]} == {str(TABLE), copy}


def test_wrong_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "evaluate", str(TABLE), "--probe-rows", "-1"]) == 2
    assert "'-1' is not a whole number from 0" in capsys.readouterr().err
    assert main(["plan", "calibrate", "--output", str(tmp_path / "mine.json")]) == 2
    assert "is for tables; what is measured here is kept in the cache" in capsys.readouterr().err

    def hold_out(row: dict[str, str]) -> None:
        row["fit_role"] = "holdout"

    assert main(["plan", "calibrate", changed_table(tmp_path / "held.csv", hold_out)]) == 2
    assert "no mapped row with fit_role calibrate and a measured time" in capsys.readouterr().err


def test_fitted_constants_are_printed_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "fit", lambda samples: shipped())
    assert main(["plan", "calibrate", str(TABLE)]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out) == json.loads(json.dumps(shipped().to_dict()))
    assert "fitted stacks" in error and all(name in error for name in list(shipped().stacks)[:1])
    assert main(["plan", "calibrate", str(TABLE), "--output", str(tmp_path)]) == 2
    assert f"--output={tmp_path}: Is a directory" in capsys.readouterr().err


def test_what_is_measured_here_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = MachineConstants({1: 0.1, 2: 0.06}, {1: 8.0, 2: 5.0}, 1.25, 1e-4, {1: 1.0, 2: 1.3}, 2.0**20, "a test")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine_probe, "probe", lambda say: constants)
    assert machine_constants() is None
    assert main(["plan", "calibrate"]) == 0
    out, error = capsys.readouterr()
    assert Path(out.strip()).is_relative_to(tmp_path)
    assert machine_constants() == constants
    assert "0.0600" in error and "1.30" in error and "between processes 1.25 GB/s and 100 us a hop" in error
