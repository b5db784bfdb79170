"""Tokens of a corpus from a process for each core, in the order of the corpus, and kept when the run is killed.

This process reads the corpus as it would alone, so numbers, order and messages are the same, and hands groups of
documents to processes that encode them. Each group becomes a part, a file named by its number and a hash of what is in
it; parts are taken in order. A run that is started again reads the corpus again, which is quick, and takes the parts
that are there.

The processes are programs of their own rather than children of `multiprocessing`: those would import the user's script
again, and a fork would inherit the locks of the threads of tokenizers. They encode in one thread each, since the
threads of one process wait for each other's cache of words.
"""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import xxhash

from shardwise.data.parts import read_part
from shardwise.data.tokenize_worker import Encoder
from shardwise.errors import DataError, UserCodeError, WorkerError

Item = TypeVar("Item")

REFUSALS = (DataError, UserCodeError)  # of what is read
AHEAD = 2  # groups that are read before they are needed, for each process
SETTINGS = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def usable_cores() -> int:
    """Return the cores of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def remove_parts(parts: Path) -> None:
    """Remove the parts of a corpus: the whole is there, or will never be."""
    if parts.is_dir():
        shutil.rmtree(parts, ignore_errors=True)


@contextmanager
def parts_removed_if_refused(parts: Path) -> Iterator[None]:
    """Remove the parts of a corpus that is refused in the block: mended, it is another one."""
    try:
        yield
    except REFUSALS:
        remove_parts(parts)
        raise


def grouped(items: Iterable[Item], size: Callable[[Item], int], least: int) -> Iterator[list[Item]]:
    """Yield items in groups of `least` by their `size`, which are the same each time."""
    group: list[Item] = []
    total = 0
    try:
        for item in items:
            group.append(item)
            total += size(item)
            if total >= least:
                yield group
                group, total = [], 0
    except REFUSALS:
        yield group  # what stands before the refused item may be wrong too, and is named first
        raise
    if group:
        yield group


class Begun(NamedTuple):
    """The arrays of a group, there or on their way, and whether its part was there before."""

    arrays: Future[list[np.ndarray]]
    is_reused: bool


class PartStore(Generic[Item]):
    """Encodes groups of items, in order; `is_reused` says of the last one that an earlier run had made its part.

    Args:
        encoder: makes arrays of a group; it can be pickled.
        directory: of the parts. It is kept when the process is killed or interrupted.
        processes: that encode.
        fewest: groups from which on processes are started.
    """

    def __init__(self, encoder: Encoder, directory: Path, processes: int, fewest: int) -> None:
        self._encoder, self._directory, self._processes, self._fewest = encoder, directory, processes, fewest
        self.is_reused = False

    def encoded(self, groups: Iterator[list[Item]]) -> Iterator[tuple[list[Item], list[np.ndarray]]]:
        """Yield each group with its arrays. A corpus of a few groups is encoded in this process.

        Raises:
            DataError: the first one in the order of the corpus, of reading or of encoding.
            WorkerError: a process has ended.
        """
        readable = _Readable(groups)
        first = list(islice(readable, self._fewest))
        if len(first) < self._fewest:
            yield from ((group, self._encoder(group)) for group in first)
        else:
            self._directory.mkdir(exist_ok=True)
            yield from self._in_parallel(chain(first, readable))
        if readable.refusal is not None:
            raise readable.refusal

    def _in_parallel(self, groups: Iterable[list[Item]]) -> Iterator[tuple[list[Item], list[np.ndarray]]]:
        waiting: deque[tuple[list[Item], Begun]] = deque()
        with _Workers(self._encoder, self._processes) as workers:
            for number, group in enumerate(groups):
                waiting.append((group, self._begun(workers, number, group)))
                if len(waiting) > AHEAD * self._processes:
                    yield self._taken(*waiting.popleft())
            while waiting:
                yield self._taken(*waiting.popleft())

    def _taken(self, group: list[Item], begun: Begun) -> tuple[list[Item], list[np.ndarray]]:
        self.is_reused = begun.is_reused
        return group, begun.arrays.result()

    def _begun(self, workers: _Workers, number: int, group: list[Item]) -> Begun:
        """Return the arrays of a group: those of its part, or of the process that makes it."""
        content = pickle.dumps(group, protocol=pickle.HIGHEST_PROTOCOL)
        path = self._directory / f"{number:08}-{xxhash.xxh3_128(content).hexdigest()}"
        arrays = read_part(path)
        if arrays is None:
            return Begun(workers.submit(path, content), is_reused=False)
        there: Future[list[np.ndarray]] = Future()
        there.set_result(arrays)
        return Begun(there, is_reused=True)


class _Readable(Generic[Item]):
    """Groups up to the first that is refused: `refusal` is raised when those before it have turned out right."""

    def __init__(self, groups: Iterator[list[Item]]) -> None:
        self._groups = groups
        self.refusal: DataError | UserCodeError | None = None

    def __iter__(self) -> Iterator[list[Item]]:
        return self

    def __next__(self) -> list[Item]:
        try:
            return next(self._groups)
        except REFUSALS as refusal:
            self.refusal = refusal
            raise StopIteration from None


class _Workers:
    """Processes that encode, started as there is work for them and ended with the block."""

    def __init__(self, encoder: Encoder, most: int) -> None:
        self._encoder = pickle.dumps(encoder)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(most)  # each waits for the process that it has taken
        self._started: list[_Worker] = []
        self._most = most

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as ending:
            ending.callback(self._threads.shutdown)
            for worker in self._started:
                ending.callback(worker.end)
            self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(self, path: Path, content: bytes) -> Future[list[np.ndarray]]:
        if len(self._started) < self._most:
            self._started.append(_Worker(self._encoder))
            self._idle.put(self._started[-1])
        return self._threads.submit(self._encode, path, content)

    def _encode(self, path: Path, content: bytes) -> list[np.ndarray]:
        worker = self._idle.get()
        try:
            worker.encode(path, content)
        finally:
            self._idle.put(worker)
        arrays = read_part(path)
        if arrays is None:
            raise OSError(f"{path} is not what has been written")
        return arrays


class _Worker:
    """A process of `tokenize_worker`, seen from the one that started it."""

    def __init__(self, encoder: bytes) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {**os.environ, **SETTINGS, "PYTHONPATH": paths}
        command = [sys.executable, "-P", "-m", "shardwise.data.tokenize_worker"]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        except OSError as error:
            raise WorkerError(
                f"no process to tokenize can be started: {error}; let this user have more processes or memory"
            ) from error
        self._greeting = encoder

    def encode(self, path: Path, content: bytes) -> None:
        """Have a part written."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(self._greeting)
            self._greeting = b""
            pickle.dump((path, content), self._process.stdin)
            self._process.stdin.flush()
            message = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, ValueError, pickle.UnpicklingError):
            raise WorkerError(
                f"a process that tokenizes has ended ({_end(self._process.wait())}); start the job again, and it goes "
                f"on from the parts in {path.parent} that are complete"
            ) from None
        if message is not None:
            raise DataError(message)

    def end(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError, ValueError):
                    stream.close()


def _end(code: int) -> str:
    """Return how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}; the host may have run out of memory" if name == "SIGKILL" else name
