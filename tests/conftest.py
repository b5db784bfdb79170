"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import pytest

from shardwise.testing.world import WorldPool


@pytest.fixture(scope="session")
def world_pool() -> Iterator[WorldPool]:
    """Worker processes for the whole session: `world_pool.run(4, function, argument)`."""
    with WorldPool() as pool:
        yield pool
