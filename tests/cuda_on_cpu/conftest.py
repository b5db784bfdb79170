"""Fixtures of the cases on a machine that has GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shardwise.testing.world import WorldPool


@pytest.fixture(scope="session")
def world_pool() -> Iterator[WorldPool]:
    """Processes that may use CUDA: in its place they are forked as everywhere, with GPUs they are started afresh."""
    with WorldPool(start_method="forkserver" if "PLAYED_CUDA" in os.environ else "spawn") as pool:
        yield pool
