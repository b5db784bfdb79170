"""The benchmark of long sequences: its verdict, its table, and one real row at toy size."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import attention_cpu

TOY = ["--layers", "2", "--width", "32", "--heads", "2", "--vocabulary", "128", "--sequence", "32", "--rounds", "1"]


def row(**more: Any) -> dict[str, Any]:
    return {"family": "gptj", "losses": [4.0, 4.0], "peaks": [4e6, 1e6], "rounds": [[3.0, 1.5]], "speed": 2.0,
            "share": 0.25, **more}  # fmt: skip


@pytest.mark.parametrize(
    "found, says",
    [
        (row(), None),
        (row(losses=[4.0, 4.01]), "first losses differ"),
        (row(speed=1.2), "1.20 times the speed, asked for 1.3"),
        (row(share=0.51), "0.51 of the peak, asked for 0.5"),
    ],
)
def test_verdict(found: dict[str, Any], says: str | None) -> None:
    problems = attention_cpu.check(found)
    assert problems == [] if says is None else says in problems[0]


def test_table() -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(attention_cpu.render([row()]))
    assert "2.00" in (text := console.export_text()) and "0.25" in text and "1.50" in text


@pytest.mark.slow  # it starts processes for each contender
@pytest.mark.parametrize("family", ["bloom"])
def test_a_real_row_starts_from_the_same_weights(tmp_path: Path, family: str) -> None:
    attention_cpu.main([*TOY, "--families", family, "--json", str(tmp_path / "result.json")])
    (found,) = json.loads((tmp_path / "result.json").read_text())["rows"]
    theirs, ours = found["losses"]
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert 0 < found["peaks"][1] < 2 * found["peaks"][0]
