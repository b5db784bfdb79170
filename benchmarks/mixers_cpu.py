"""A step of a Mamba-2 on tensor ranks: mixers shared by heads, beside mixers split by the outputs of their layers.

    python -m benchmarks.mixers_cpu --ranks 2 --json result.json

Both train the same weights on the same rows, in turns, as `benchmarks.carried_state_cpu` does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from benchmarks.carried_state_cpu import compare, interleaved, mamba

WAYS = ("by heads", "by outputs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return compare("mixers_cpu", __doc__, measure, arguments, WAYS)


def measure(layers: int, width: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return what this rank measured. Collective."""
    parallel = {"tensor_parallel_degree": dist.get_world_size()}
    changes = (lambda facts: facts, lambda facts: facts.with_whole_mixers(facts.mixers))
    return interleaved(
        {way: mamba(layers, width, parallel, change) for way, change in zip(WAYS, changes, strict=True)}, rounds
    )


if __name__ == "__main__":
    sys.exit(main())
