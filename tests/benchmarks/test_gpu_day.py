"""The day a GPU is there: what is run, passed over, written down and rehearsed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_day, training_gpu
from benchmarks.gpu_day import CASES, LINES, PAGE, CasesLine, TrainingLine


@dataclass(frozen=True)
class Counted:
    """A line that writes down how often it ran."""

    name: str
    seconds: int
    title: str = "a line"
    asked: str = "all"

    def run(self, path: Path, rehearse: bool) -> None:
        if self.name == "raises":
            raise OSError("planted: no device")
        path.write_text(json.dumps({"rehearse": rehearse}))

    def cell(self, result: dict[str, Any]) -> str:
        return str(result["rehearse"])

    def problems(self, result: dict[str, Any], rehearse: bool) -> list[str]:
        return ["planted: it failed"] if self.name == "fails" else []


def training_result(**row: Any) -> dict[str, Any]:
    base = {"contender": "shardwise-compile", "tokens_per_second": {}, "mfu": 0.568}
    rows = [base, {"contender": "torch-compile", **row}]
    return {"cases": [{"name": "llama 1B", "ended": "", "case": {"base": ""}, "rows": rows}]}


def test_the_page_has_the_lines_in_their_order() -> None:
    rows = [row.split(" | ") for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    table = [(row[0].strip("| "), row[1]) for row in rows if len(row) == 3][2:]
    assert table == [(line.title, line.asked) for line in LINES]


def test_lines_are_of_files_and_options_that_exist() -> None:
    for line in LINES:
        if isinstance(line, CasesLine):
            assert (CASES / f"{line.name.partition('-')[0]}.py").is_file()
        elif isinstance(line, TrainingLine):
            options = training_gpu._parse(line.arguments)
            assert line.contender in options.contenders and line.seconds <= 300


def test_what_has_a_result_or_no_time_is_passed_over(tmp_path: Path) -> None:
    lines = [Counted("done", 1), Counted("fails", 1), Counted("long", 100), Counted("raises", 1), Counted("last", 1)]
    (tmp_path / "done.json").write_text('{"rehearse": "before"}')
    problems = gpu_day.run_lines(lines, tmp_path, seconds=50, rehearse=False)
    assert problems == ["fails: planted: it failed", "raises: planted: no device"]
    assert {path.stem for path in tmp_path.iterdir()} == {"done", "fails", "last"}
    assert "before" in (tmp_path / "done.json").read_text()
    assert gpu_day.run_lines(lines, tmp_path, seconds=0, rehearse=True) == ["raises: planted: no device"]
    assert (tmp_path / "long.json").exists()


def test_measured_lines_are_written_and_the_others_stay() -> None:
    page = PAGE.read_text()
    assert gpu_day.with_results(page, {}) == page
    written = gpu_day.with_results(page, {"bf16": training_result(base_ratio={"median": 1.084}, tokens_per_second={})})
    [row] = [row for row in written.splitlines() if row.startswith("| bf16, Llama 1B, beside transformers")]
    assert row.endswith("| llama 1B: MFU 56.8%, 1.08 times |")
    assert [*map(len, (written.splitlines(), page.splitlines()))] == [len(page.splitlines())] * 2


@pytest.mark.parametrize(
    ("row", "rehearse", "problems"),
    [
        ({"tokens_per_second": {}}, False, 0),
        ({"failed": "x\nValueError: planted"}, True, 1),
        ({"failed": "ModuleNotFoundError: No module named 'litgpt'"}, True, 0),
        ({"failed": "ModuleNotFoundError: No module named 'litgpt'"}, False, 1),
        ({}, False, 1),
    ],
)
def test_a_row_without_figures_is_a_problem(row: dict[str, Any], rehearse: bool, problems: int) -> None:
    line = next(line for line in LINES if line.name == "bf16")
    assert len(line.problems(training_result(**row), rehearse)) == problems
    assert problems == 0 or line.cell(training_result(**row)) == "llama 1B: not measured"


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_day.main(["--results", str(tmp_path)]) == 2
    assert "--rehearse" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [line.name for line in LINES if isinstance(line, TrainingLine)])
def test_rehearsal_of_training(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_day.main(["--results", str(tmp_path), "--rehearse", "--lines", name]) == 0, capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA's own code in that place")
def test_rehearsal_of_cases(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_day.main(["--results", str(tmp_path), "--rehearse", "--lines", "cases_commands"]) == 0, (
        capfd.readouterr()
    )
    assert json.loads((tmp_path / "cases_commands.json").read_text())["passed"] == 3
