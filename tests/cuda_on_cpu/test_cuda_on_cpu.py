"""Paths that only a CUDA device takes, on a machine without one: `cases_*.py`, in a session of pytest of its own.

There the lazy device (`tests/collectives/lazy_device.cpp`) has CUDA's place, with the kernels of the CPU and streams
that do nothing until they are waited for; the engine has NCCL's. Numbers are real, and held against one process or the
CPU. What remains for a GPU: CUDA's own kernels (fused attention, Triton, torch.compile), its memory, NCCL, times, and
races between kernels, which run at once here while copies wait. On a machine with a GPU the same files run on it:
`python -m pytest tests/cuda_on_cpu/cases_*.py`; ranks that are more than the GPUs share them through the engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
BUILD = "from tests.collectives.lazy_device import build; print(build('-DAS_CUDA'))"  # it loads what it has built

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA's own code in that place"),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler"),
]


def python(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    return done.stdout


@pytest.fixture(scope="module")
def library() -> str:
    return python("-c", BUILD).splitlines()[-1]


@pytest.mark.parametrize("cases", sorted(HERE.glob("cases_*.py")), ids=lambda path: path.stem)
def test_on_a_device_in_cudas_place(library: str, cases: Path) -> None:
    path = os.pathsep.join([str(HERE / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    said = python("-m", "pytest", "-p", "no:cacheprovider", str(cases), PLAYED_CUDA=library, PYTHONPATH=path)
    assert " passed" in said and "failed" not in said
