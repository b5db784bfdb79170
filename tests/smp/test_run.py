"""`shardwise run`: a script is run unchanged, and mistakes end as messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "step_script.py"


def _run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", "run", "--device", "cpu", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_script_runs_unchanged_on_two_stages(tmp_path: Path) -> None:
    options = '{"pipeline_parallel_degree": 2, "microbatches": 4}'
    done = _run(
        "--workers", "2", "--smp-options", options, "--model-dir", tmp_path, "--channel", "train=here", SCRIPT, 2
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").read_text() == "here 2"
    assert done.stderr.count("--device cpu: ") == 1
    assert "stage 1: transformer.h.1" in done.stderr


def test_mistakes_end_without_a_traceback(tmp_path: Path) -> None:
    for words, said in (
        ((tmp_path / "none.py",), "is not a file"),
        (("--smp-options", "{", SCRIPT), "neither a JSON object"),
        (("--smp-options", '{"microbatch": 2}', SCRIPT), "Did you mean 'microbatches'?"),
        (("--channel", "train", SCRIPT), "must be NAME=DIR"),
    ):
        done = _run(*words)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
