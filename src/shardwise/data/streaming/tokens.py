"""The tokens of a stream as one rank reads them: from blocks that a producer writes ahead, waiting where it must.

The first rank of a host starts the producer at the first read. All ranks of the host read the same blocks, each those
that its samples lie in. A rank that waits says so, with the shard that is waited for; one whose producer has failed
raises its error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from shardwise.data.streaming.block_cache import (
    DEFINITION,
    ENDING,
    FAILURE,
    STATUS,
    TOKENIZER,
    Block,
    BlockCache,
    is_in_use,
    sweep,
)
from shardwise.data.streaming.definition import Position, StreamDefinition
from shardwise.data.text_encoder import TextEncoder
from shardwise.errors import DataError, OutputError

LOADED = 4  # blocks that a rank has open
POLL = 0.005
SECONDS_BEFORE_SAYING = 5.0
SECONDS_TO_START = 300.0
SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class StreamSettings:
    """Settings by which a stream is produced; none changes its tokens.

    Attributes:
        root: where the directories of running streams are.
        cache_limit: bytes of tokens that are kept ahead.
        workers: processes that tokenize.
        tokenizer: None for sources of token ids.
        name: of the source that it is among several; empty for the only one.
    """

    root: Path
    cache_limit: int
    workers: int
    tokenizer: TextEncoder | None
    name: str = ""


class StreamedTokens:
    """One rank's view of a stream; `waited` counts the seconds for which it had to wait."""

    def __init__(self, definition: StreamDefinition, settings: StreamSettings) -> None:
        self.definition, self.settings = definition, settings
        self.say: Callable[[str], None] = lambda text: None
        self.waited = 0.0
        self._run, self._rank, self._ranks = uuid4().hex, 0, 1
        self._position, self._first = Position(), 0
        self._cache: BlockCache | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # of the producer
        self._index: list[Block] = []
        self._loaded: OrderedDict[Path, np.ndarray] = OrderedDict()
        self._table = np.zeros((1, 2), dtype=np.int64)

    def join(self, run: str, local_rank: int, local_ranks: int) -> None:
        """Read from the beginning, and share the blocks of a run with the other ranks of this host.

        `run` is equal for all of them, and new for each run: `verify` makes two of one stream.
        """
        self.begin(Position(), 0)
        self._run, self._rank, self._ranks = run, local_rank, local_ranks

    def named(self, name: str) -> StreamedTokens:
        """Return the same stream as one of several sources."""
        return StreamedTokens(self.definition, replace(self.settings, name=name))

    def begin(self, position: Position, token: int) -> None:
        """Read from `token` on, which lies behind `position`, instead of from the beginning."""
        self.close()
        self._position, self._first = position, token

    def advance(self, token: int) -> None:
        """Say that nothing before `token` is read any more."""
        self._open()
        self._table[self._rank, 0] = token

    def position(self, token: int) -> Position:
        """Return the last position before `token`, which has been read up to; of its block, so equal on every rank."""
        if token <= self._first:
            return self._position
        return self._block(token - 1).position

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop - 1 of the stream."""
        tokens = self._stored(start, stop)
        return np.where(tokens < 0, ~tokens, tokens)

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions of start … stop - 1 at which a document begins; ascending."""
        return np.flatnonzero(self._stored(start, stop) < 0) + start

    def status(self) -> dict[str, Any]:
        """Return what the producer is doing; empty before it has begun."""
        return {} if self._cache is None else self._cache.read_json(STATUS) or {}

    def close(self) -> None:
        """End the producer and remove the blocks; another read begins anew."""
        self._process = self._cache = None
        self._index, self._table = [], np.zeros((1, 2), dtype=np.int64)
        self._loaded.clear()
        self._end()

    def __reduce__(self) -> tuple[type[StreamedTokens], tuple[StreamDefinition, StreamSettings]]:
        return StreamedTokens, (self.definition, self.settings)

    def _stored(self, start: int, stop: int) -> np.ndarray:
        """Return tokens as the blocks hold them: the first of each document complemented."""
        self._open()
        if start < self._table[self._rank, 0]:
            raise IndexError(f"token {start} of a stream that is read from {self._table[self._rank, 0]} on")
        self._table[self._rank, 1] = max(stop, int(self._table[self._rank, 1]))
        parts = []
        while start < stop:
            block = self._block(start)
            end = min(stop, block.end)
            first = block.position.tokens
            parts.append(self._content(block)[start - first : end - first])
            start = end
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def _content(self, block: Block) -> np.ndarray:
        if block.path not in self._loaded:
            self._loaded[block.path] = np.load(block.path, mmap_mode="r", allow_pickle=False)
            if len(self._loaded) > LOADED:
                self._loaded.popitem(last=False)
        return self._loaded[block.path]

    def _block(self, token: int) -> Block:
        """Return the block that holds a token, once it is there."""
        for _ in self._waits(lambda: self._waiting_for(token)):
            place = bisect_right(self._index, token, key=lambda block: block.position.tokens) - 1
            if place >= 0 and self._index[place].end > token:
                return self._index[place]
            assert self._cache is not None
            new = {block.position: block for block in [*self._index[-LOADED:], *self._cache.blocks()]}
            self._index = sorted(new.values())
        raise AssertionError("waits end with an error or not at all")

    def _waits(self, words: Callable[[], str]) -> Iterator[None]:
        """Yield twice at once, then again and again; says what is waited for, and how long.

        Raises:
            DataError: the producer has failed, or is gone.
        """
        yield
        began = said = time.monotonic()
        try:
            while True:
                yield
                self._check_producer()
                time.sleep(POLL)
                if time.monotonic() - said > SECONDS_BEFORE_SAYING:
                    said = time.monotonic()
                    self.say(f"{words()} ({said - began:.0f} s)")
        finally:
            self.waited += time.monotonic() - began

    def _waiting_for(self, token: int) -> str:
        """Return a sentence on what is slow."""
        known = self.status()
        shard, stage = known.get("shard", "the first shard"), known.get("stage", "starting")
        rate = f"{known.get('tokens_per_second', 0):,.0f} tokens/s so far"
        if stage == "fetching":
            speed = known["fetched"] / max(known["fetch_seconds"], 1e-9) / 1e6
            rate = f"{known['fetched'] / 1e6:.1f} of {known['size'] / 1e6:.1f} MB at {speed:.2f} MB/s, {rate}"
        silent = time.time() - known.get("at", time.time())
        silence = f", nothing new for {silent:.0f} s" if silent > SECONDS_BEFORE_SAYING else ""
        whose = f"{self.settings.name}: " if self.settings.name else ""
        return f"training waits for data: {whose}{shard} is slow ({stage}, {rate}{silence})"

    def _check_producer(self) -> None:
        assert self._cache is not None
        is_alive = self._process.poll() is None if self._process else is_in_use(self._cache.directory)
        failure = self._cache.read_json(FAILURE)
        if failure is not None:
            whose = f"data.sources, {self.settings.name}" if self.settings.name else "the stream"
            message = failure["message"]
            raise DataError(f"{whose}: {message}")
        if not is_alive:
            raise DataError(
                "the process that reads the stream ahead is gone; it was killed, perhaps for memory; go on from the "
                "last checkpoint, with fewer data.num_workers"
            )

    def _open(self) -> None:
        """Start the producer, or find it."""
        if self._cache is not None:
            return
        directory = self.settings.root / f"{os.uname().nodename}-{self._run}"
        cache = BlockCache(directory)
        if self._rank == 0:
            self._start(cache)
        began = time.monotonic()
        while (table := cache.readers()) is None:
            if self._process is not None and self._process.poll() is not None:
                raise DataError(
                    "the process that reads the stream ahead did not start; let this user have more processes or memory"
                )
            if time.monotonic() - began > SECONDS_TO_START:
                raise DataError(f"no process reads the stream ahead in {directory}; start the job again")
            time.sleep(POLL)
        self._cache, self._table = cache, table

    def _start(self, cache: BlockCache) -> None:
        try:
            self.settings.root.mkdir(parents=True, exist_ok=True)
            sweep(self.settings.root)
            cache.directory.mkdir(mode=0o700, exist_ok=True)
            if self.settings.tokenizer is not None:
                cache.write_json(TOKENIZER, asdict(self.settings.tokenizer))
            cache.write_json(
                DEFINITION,
                {
                    "definition": self.definition.to_json(),
                    "position": self._position,
                    "start": self._first,
                    "ranks": self._ranks,
                    "cache_limit": self.settings.cache_limit,
                    "workers": self.settings.workers,
                },
            )
        except OSError as error:
            raise OutputError(
                f"the cache {self.settings.root} cannot be written ({error}); set data.cache_directory to one that can"
            ) from error
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.data.streaming.producer", str(cache.directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._end = weakref.finalize(self, _end, self._process, cache.directory)  # at exit, at the latest


def _end(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Let a producer end, which removes its blocks; do so for one that was killed."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for left in (directory, Path(f"{directory}{ENDING}")):
        shutil.rmtree(left, ignore_errors=True)
