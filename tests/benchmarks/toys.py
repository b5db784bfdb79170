"""Contenders that need no library: builders for the harness tests."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from benchmarks.harness import Contender, Step


def counting(start: float, _directory: Path, rank: int, world: int) -> Step:
    """Losses start + rank, start + rank + world, ...: their mean over ranks is known."""
    state = {"value": start + rank}

    def step() -> torch.Tensor:
        value = state["value"]
        state["value"] += world
        return torch.tensor(value)

    return step


def slow(start: float, directory: Path, rank: int, world: int) -> Step:
    """As `counting`; rank 1 takes its time."""
    step = counting(start, directory, rank, world)

    def delayed() -> torch.Tensor:
        time.sleep(0.1 * rank)
        return step()

    return delayed


def raising(_start: float, _directory: Path, rank: int, _world: int) -> Step:
    """Rank 1 cannot be built."""
    if rank == 1:
        raise RuntimeError("planted: rank 1 cannot be built")
    return lambda: torch.tensor(0.0)


def dying(start: float, directory: Path, rank: int, world: int) -> Step:
    """Rank 1 leaves without a word in its second step, and rank 0 meets that before rank 1's pipe is closed."""
    step, calls = counting(start, directory, rank, world), iter(range(100))

    def fatal() -> torch.Tensor:
        if next(calls) < 1:
            return step()
        if rank == 0:
            raise ConnectionError("planted: closed by peer")
        print("planted: last words", flush=True)
        time.sleep(0.2)
        os._exit(7)

    return fatal


def toy(name: str, package: str = "torch") -> Contender:
    return Contender(name, f"tests.benchmarks.toys:{name}", package)
