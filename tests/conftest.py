"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import pytest

from shardwise.collectives import engine
from shardwise.testing.world import WorldPool
from tests.plugins.processor_time import ProcessorTimes
from tests.s3 import s3, s3_server  # noqa: F401 fixtures

# Tests that move the cache, and the processes they start, share one build of the engine.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
os.environ.setdefault("SHARDWISE_ENGINE_DIRECTORY", str(CACHE / "shardwise" / "engine"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardwise")
    group.addoption("--processor-times", action="store_true", help="show the processor time of tests by file")


def pytest_configure(config: pytest.Config) -> None:
    get_temp_dir()  # before a test gives itself another TMPDIR
    config.pluginmanager.register(ProcessorTimes(config))


@pytest.fixture(scope="session", autouse=True)
def built_engine() -> None:
    """Compiled, where it can be, before any test's time runs: jobs on CPU ranks take it by themselves."""
    if not engine.obstacle():
        engine.build()


@pytest.fixture(scope="session")
def world_pool() -> Iterator[WorldPool]:
    """Worker processes for the whole session: `world_pool.run(4, function, argument)`."""
    with WorldPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tokens.jsonl and text.txt, for the tiny jobs of tests.parity.jobs."""
    from tests.parity.jobs import write_text, write_tokens  # torch and transformers, only where they are needed

    directory = tmp_path_factory.mktemp("corpora")
    write_tokens(directory)
    write_text(directory)
    return directory
