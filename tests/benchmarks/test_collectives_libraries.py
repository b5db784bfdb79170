"""Libraries of others take steps on both backends, and the table has a ratio."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import collectives_libraries


def test_a_row_has_both_times_and_their_ratio() -> None:
    row = {"library": "DDP", "ranks": 2, "seconds": {"shardwise": 0.001, "gloo": 0.0025}, "ratio": 2.5}
    table = collectives_libraries.render([row])
    assert [next(iter(column.cells)) for column in table.columns] == ["DDP", "2", "1.00", "2.50", "2.50"]


@pytest.mark.slow
def test_every_installed_library_runs(tmp_path: Path) -> None:
    path = tmp_path / "libraries.json"
    collectives_libraries.main(["--ranks", "2", "--rounds", "1", "--steps", "2", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    absent = {
        name for name, package in collectives_libraries.OPTIONAL.items() if importlib.util.find_spec(package) is None
    }
    every = collectives_libraries.LIBRARIES.keys() | collectives_libraries.OWN_GROUPS.keys()
    assert {row["library"] for row in rows} == every - absent
    assert all(seconds > 0 for row in rows for seconds in row["seconds"].values())
