"""Fixtures that every test may use."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import pytest
import torch

from shardwise.collectives import engine
from shardwise.testing.world import PRELOAD, WorldPool
from tests.plugins.leftovers import Leftovers
from tests.plugins.processor_time import ProcessorTimes
from tests.plugins.sampled import Samples
from tests.plugins.subjects import Subjects
from tests.s3 import s3, s3_server  # noqa: F401 fixtures

# Tests that move the cache, and the processes they start, share one build of the engine.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
os.environ.setdefault("SHARDWISE_ENGINE_DIRECTORY", str(CACHE / "shardwise" / "engine"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardwise")
    group.addoption("--processor-times", action="store_true", help="show the processor time of tests by file")
    group.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in a drawn order")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # which xdist gives its workers
        config.pluginmanager.register(Leftovers())
    cores, processes = len(os.sched_getaffinity(0)), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, cores // processes))  # threads of two that share a core wait for each other
    get_temp_dir()  # before a test gives itself another TMPDIR
    # Whichever test asks for a fork first starts the session's one fork server: without these it would fork bare ones.
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    config.pluginmanager.register(ProcessorTimes(config))
    config.pluginmanager.register(Subjects(config))
    config.pluginmanager.register(Samples())


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Give the whole suite a process for each core, up to four: each brings its worlds. A few files start at once."""
    is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    return min(4, len(os.sched_getaffinity(0))) if is_whole else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests in each: tests of a file share what its fixtures have made."""
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    draw = random.Random(seed)
    files = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    order = sorted(files)
    draw.shuffle(order)
    for tests in files.values():
        draw.shuffle(tests)
    items[:] = [test for path in order for test in files[path]]


@pytest.fixture(scope="session", autouse=True)
def built_engine() -> None:
    """Compiled, where it can be, before any test's time runs: jobs on CPU ranks take it by themselves."""
    if not engine.obstacle():
        engine.build()


@pytest.fixture(scope="session")
def world_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorldPool]:
    """Worker processes for the whole session: `world_pool.run(4, function, argument)`."""
    facts = tmp_path_factory.mktemp("facts")
    with WorldPool(initializer=functools.partial(_prepare_worker, facts)) as pool:
        yield pool


def _prepare_worker(facts: Path) -> None:
    from tests import measured, studied  # torch and transformers, only where they are needed
    from tests.fork_server import begin_threads

    begin_threads()
    studied.share(facts)
    measured.keep()


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tokens.jsonl and text.txt, for the tiny jobs of tests.parity.jobs."""
    from tests.parity.jobs import write_text, write_tokens  # torch and transformers, only where they are needed

    directory = tmp_path_factory.mktemp("corpora")
    write_tokens(directory)
    write_text(directory)
    return directory
