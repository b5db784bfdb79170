"""Open MPI beside the backends of torch, whose wheels have none for it: mpirun starts the ranks, mpi4py calls it.

Its buffers are arrays of numpy. Ranks of MPI are ranks of torch too, so all contenders run in the same processes.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
NAME, NOT_INSTALLED = "mpi", "not installed"


def is_installed() -> bool:
    """Return whether ranks can be started by Open MPI and can call it."""
    return shutil.which("ompi_info") is not None and importlib.util.find_spec("mpi4py") is not None


def has_started_this() -> bool:
    """Return whether this process is a rank of mpirun's."""
    return "OMPI_COMM_WORLD_RANK" in os.environ


def start(ranks: int, words: Sequence[str]) -> int:
    """Start Python with these words on each rank, of which there may be more than cores; return the exit code."""
    options = ["--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    return subprocess.run(["mpirun", *options, "-np", str(ranks), sys.executable, *words], cwd=ROOT).returncode


def group(ranks: int) -> Any:
    """Return the communicator of the first ranks; on the others one that cannot be used."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.Split(0 if world.rank < ranks else MPI.UNDEFINED)


def version() -> str:
    """Return the version of what is called."""
    from mpi4py import MPI

    return MPI.Get_library_version().partition(",")[0]


def call(operation: str, elements: int, communicator: Any) -> Callable[[], Any]:
    """Return a call of an operation on a full buffer of fp32."""
    from mpi4py import MPI

    whole, received = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    part = np.zeros(elements // communicator.size, np.float32)
    return {
        "all_reduce": lambda: communicator.Allreduce(MPI.IN_PLACE, whole),
        "all_gather": lambda: communicator.Allgather(part, whole),
        "reduce_scatter": lambda: communicator.Reduce_scatter_block(whole, part),
        "broadcast": lambda: communicator.Bcast(whole, 0),
        "all_to_all": lambda: communicator.Alltoall(whole, received),
    }[operation]
