"""transformers' own Trainer, in its SMP mode, beside the same script without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate (extra test)")
SCRIPT = Path(__file__).parent / "trainer_script.py"


def _run(options: str | None, workers: int, *words: str | Path | int) -> dict[str, Any]:
    here = ["-m", "shardwise", "run", "--device", "cpu", "--workers", str(workers), "--smp-options", str(options)]
    command = [sys.executable, *(here if options else []), str(SCRIPT), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Trainer is in its SMP mode") == (1 if options else 0)
    found: dict[str, Any] = json.loads((Path(str(words[0])) / "result.json").read_text())
    return found


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["count"] == expected["count"] == 10
    assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
    for one, other in zip(found["losses"], expected["losses"], strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_trainer_trains_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    expected = _run(None, 1, tmp_path / "plain", 3, 4)
    _run('{"partitions": 1}', 1, tmp_path / "smp", 2, 4)
    _same(_run('{"partitions": 1}', 1, tmp_path / "smp", 3, 4, "resume"), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, rows",
    [
        ('{"partitions": 2, "microbatches": 2}', 4),
        ('{"partitions": 1, "ddp": true}', 2),
        ('{"partitions": 1, "tensor_parallel_degree": 2, "ddp": true, "prescaled_batch": true}', 4),
        ('{"partitions": 1, "ddp": true, "sharded_data_parallel_degree": 2}', 2),
    ],
)
def test_trainer_on_two_ranks(tmp_path: Path, options: str, rows: int) -> None:
    expected = _run(None, 1, tmp_path / "plain", 3, 4)
    _run(options, 2, tmp_path / "smp", 2, rows)
    _same(_run(options, 2, tmp_path / "smp", 3, rows, "resume"), expected)
