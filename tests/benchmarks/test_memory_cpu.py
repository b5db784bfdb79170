"""The memory benchmark: its table, its verdict, and one real row."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import memory_cpu

TOY = ["--layers", "2", "--width", "32", "--heads", "2", "--vocabulary", "128", "--sequence", "16"]


def row(measured: float, predicted: float, **more: Any) -> dict[str, Any]:
    causes = {"parameters": 1e6, "unsharded_gradients": 2e6, "logits": 0.0}
    error = predicted / measured - 1
    return {"degree": 2, "policy": "full", "measured": measured, "predicted": predicted, "error": error,
            "moment": "loss", "causes": causes, "peaks": [measured], **more}  # fmt: skip


def test_table_leaves_out_causes_that_are_nothing_everywhere() -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(memory_cpu.render([row(3.2e6, 3e6)], memory_cpu._parse(TOY)))
    text = console.export_text()
    assert "3.20" in text and "3.00" in text and "-6.2%" in text
    assert "parameters" in text and "unsharded" in text and "logits" not in text


@pytest.mark.parametrize("predicted, code", [(1.09e6, 0), (1.11e6, 1), (0.89e6, 1)])
def test_a_wrong_prediction_fails_the_run(predicted: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_cpu, "measure_row", lambda pool, settings, degree, policy: row(1e6, predicted))
    assert memory_cpu.main([*TOY, "--degrees", "1", "--policies", "none"]) == code


@pytest.mark.slow
def test_a_real_row_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At this size small tensors that the formulas leave out weigh more, so only the order of magnitude is asked."""
    memory_cpu.main([*TOY, "--degrees", "1", "--policies", "none", "--json", str(tmp_path / "result.json")])
    assert "GPT-NeoX, 2 layers x 32" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert found["measured"] == found["peaks"][0] > 4 * 4 * 2 * 12 * 32 * 32  # parameters, gradients, two moments
    assert abs(found["error"]) < 0.3
