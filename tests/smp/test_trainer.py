"""transformers' own Trainer, in its SMP mode, beside the same script without it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.fork_server import run_python

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate (extra test)")
SCRIPT = Path(__file__).parent / "trainer_script.py"
FORMER = Path(__file__).parent / "former_trainer_script.py"


def _started(options: str | None, workers: int, script: Path, *words: str | Path | int) -> None:
    here = ["-m", "shardwise", "run", "--device", "cpu", "--workers", str(workers), "--smp-options", str(options)]
    command = [*(here if options else []), script, *words]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(each for each in (root, os.environ.get("PYTHONPATH")) if each)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = run_python(*command, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Trainer is in its SMP mode") == (1 if options else 0)


def _run(options: str | None, workers: int, *words: str | Path | int) -> dict[str, Any]:
    _started(options, workers, SCRIPT, *words)
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


def _former(options: str, workers: int, directory: Path, rows: int, *more: str) -> dict[str, Any]:
    words = ["--directory", directory, "--evaluation_strategy", "steps", "--eval_steps", 2, "--max_steps", 4]
    words += ["--save_steps", 2, "--logging_steps", 1, "--report_to", "none", "--lr_scheduler_type", "constant"]
    words += [f"--per_device_{kind}_batch_size={rows}" for kind in ("train", "eval")]
    _started(options, workers, FORMER, *words, *more)
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


def _check_former(tmp_path: Path, options: str, workers: int, rows: int) -> dict[str, Any]:
    """A run that is resumed at the second step goes on exactly as one that did not stop, with dropout."""
    directory = tmp_path / f"{workers}"
    whole = _former(options, workers, directory, rows, "--overwrite_output_dir", "--lr", "0.02")
    assert whole["lr"] == 0.02 and len(whole["steps"]) == 4
    shutil.rmtree(directory / "checkpoint-4")
    assert _former(options, workers, directory, rows, "--lr", "0.02") == whole
    assert AutoModelForCausalLM.from_pretrained(directory).config.n_embd == 32
    return whole


ALONE = '{"partitions": 1, "microbatches": 2}'


@pytest.mark.slow
def test_a_script_of_transformers_4_with_a_replaced_model_trains_and_resumes(tmp_path: Path) -> None:
    _check_former(tmp_path, ALONE, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, rows",
    [
        ('{"partitions": 2, "microbatches": 2}', 4),
        ('{"partitions": 1, "microbatches": 2, "tensor_parallel_degree": 2, "ddp": true, "prescaled_batch": true}', 4),
        ('{"partitions": 1, "ddp": true, "sharded_data_parallel_degree": 2}', 2),
        ('{"partitions": 1, "ddp": true, "shard_optimizer_state": true}', 2),
    ],
)
def test_a_script_of_transformers_4_on_two_ranks(tmp_path: Path, options: str, rows: int) -> None:
    alone, found = _check_former(tmp_path, ALONE, 1, 4), _check_former(tmp_path, options, 2, rows)
    for step, values in alone["steps"].items():
        assert found["steps"][step] == pytest.approx(values, rel=1e-4)
