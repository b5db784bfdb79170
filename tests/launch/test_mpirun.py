"""Ranks that Open MPI's mpirun has started for real: the same numbers, plain lines, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.elastic_cluster import JOB, MODULE, ROOT, records_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("ompi_info") is None, reason="Open MPI's mpirun is not installed (openmpi-bin)"),
]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
FAILING = """
import os
import signal

import shardwise


class Failing(shardwise.Callback):
    def on_step_end(self, session, record):
        if record["step"] == 2 and os.environ["RANK"] == "1":
            if os.path.exists("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("rank 1 has no more")
"""


def train(
    directory: Path, name: str, start: list[str], *words: str, **training: Any
) -> subprocess.CompletedProcess[str]:
    """Train the job, whose output is `name`, by ranks that `start` starts."""
    (directory / "points.py").write_text(MODULE)
    (directory / "failing.py").write_text(FAILING)
    own = {"steps": 4, "sequences_per_step": 4, "gradient_accumulation": None} | training
    sections = {"training": JOB["training"] | own, "checkpoint": {}, "output": name}
    data = JOB["data"] | {"cache_directory": str(directory / "cache")}
    (directory / "job.yaml").write_text(json.dumps(JOB | sections | {"data": data}))
    path = os.pathsep.join([str(ROOT / "src"), str(directory)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [*start, sys.executable, "-m", "shardwise", "train", "job.yaml", *words]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600)


def test_its_ranks_train_as_those_that_we_start(tmp_path: Path) -> None:
    done = train(tmp_path, "by-mpi", MPIRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 cpu ranks" in done.stdout and "step 4/4" in done.stdout
    assert "\x1b" not in done.stdout, "mpirun gives ranks a terminal, and its output may be a file"
    alone = train(tmp_path, "alone", [], "--parallel.workers", "1")
    assert alone.returncode == 0, alone.stderr
    records, expected = records_of(tmp_path / "by-mpi"), records_of(tmp_path / "alone")
    assert [len(record["peak_memory_bytes"]) for record in records] == [2] * 4
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in records] == pytest.approx([record[key] for record in expected], rel=1e-9)


def test_exit_codes_come_through_it(tmp_path: Path) -> None:
    mistaken = train(tmp_path, "out", MPIRUN, step=4)
    assert mistaken.returncode == 2, mistaken.stdout + mistaken.stderr
    assert "training.step" in mistaken.stderr and "Traceback" not in mistaken.stderr
    failed = train(tmp_path, "failed", MPIRUN, callbacks=["failing:Failing"])
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert "error: rank 1: failing:Failing.on_step_end raised RuntimeError: rank 1 has no more" in failed.stderr
    (tmp_path / "dies").touch()
    died = train(tmp_path, "died", MPIRUN, callbacks=["failing:Failing"])
    assert died.returncode not in (0, 2), died.stdout + died.stderr
