"""The process that reads a stream, lets worker processes tokenize it, and fills the cache of blocks ahead of the ranks.

`python -m shardwise.data.streaming.producer DIRECTORY`, started by the first local rank, whose end is its end too: it
watches its parent. Signals for the job are the ranks' to answer; this process goes on until its standard input closes.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwise.data.streaming.block_cache import (
    DEFINITION,
    ENDING,
    FAILURE,
    STATUS,
    TOKENIZER,
    Block,
    BlockCache,
    hold_lock,
)
from shardwise.data.streaming.definition import BUFFER_CHARACTERS, Position, StreamDefinition
from shardwise.data.streaming.fetch import fetched_shard
from shardwise.data.streaming.rows import RowReader, Value
from shardwise.data.streaming.workers import begin_worker, encode_values
from shardwise.data.text_encoder import TextEncoder
from shardwise.errors import DataError, ShardwiseError

PART = 1 << 18  # characters or ids that a worker tokenizes at once
AHEAD = 2  # buffers that are tokenized while the next one is read
POLL = 0.02  # seconds between looks at what readers have read
WATCH = 0.2


class Buffer(NamedTuple):
    """Rows in the order in which they are read."""

    shard: int
    row: int
    values: list[Value]


class StreamReader:
    """Buffers of a stream from a position on, for ever; tells what it is doing.

    Attributes:
        skipped: shards that were damaged and passed over -> the row from which on.
    """

    def __init__(self, definition: StreamDefinition, directory: Path, tell: Callable[..., None]) -> None:
        self.definition, self.directory, self.tell = definition, directory, tell
        self.rows = RowReader(definition.container, definition.column, definition.holds_tokens, definition.limit)
        self.skipped: dict[str, int] = {}

    def buffers(self, position: Position) -> Iterator[Buffer]:
        """Yield buffers, the first one beginning at `position`; one that a pass ends with may be empty.

        Raises:
            DataError: a shard is missing, changed or damaged.
        """
        shard, row, size = position.shard, position.row, len(self.definition.shards)
        while True:
            end = (shard // size + 1) * size
            yield from self._pass(shard, row, end)
            shard, row = end, 0

    def _pass(self, shard: int, row: int, end: int) -> Iterator[Buffer]:
        """Yield the buffers of a pass from a row on; it ends before the `end`-th shard."""
        current, characters = Buffer(shard, row, []), 0
        for number in range(shard, end):
            for place, value in self._values(number, row if number == shard else 0):
                current.values.append(value)
                characters += len(value)
                if len(current.values) == self.definition.buffer_rows or characters >= BUFFER_CHARACTERS:
                    yield current
                    current, characters = Buffer(number, place + 1, []), 0
        yield current

    def _values(self, number: int, start: int) -> Iterator[tuple[int, Value]]:
        shard = self.definition.shard(number)
        self.tell(shard=shard.name, stage="opening")
        row = start - 1
        with fetched_shard(shard, self.directory, self.tell) as path:
            self.tell(stage="reading")
            try:
                for row, value in self.rows.values(path, shard.name, start):
                    yield row, value
            except DataError:  # of what the shard holds: a host that skipped more than others would read other tokens
                if not self.definition.skips_bad_files:
                    raise
                self.skipped[shard.name] = row + 1
                self.tell(skipped=self.skipped)


class Status:
    """State of the producer, in the cache for whoever waits: a shard, a stage, rates, what was skipped."""

    def __init__(self, cache: BlockCache) -> None:
        self.cache, self.facts = cache, dict[str, Any]()
        self.began, self.idle, self.written = time.monotonic(), 0.0, 0.0

    def tell(self, **facts: Any) -> None:
        """Note facts, and write them if the stage is a new one or half a second has gone."""
        is_new = facts.get("stage", self.facts.get("stage")) != self.facts.get("stage")
        now = time.monotonic()
        self.facts |= {**facts, "at": time.time()}
        if is_new or now - self.written > 0.5:
            busy = max(now - self.began - self.idle, 1e-9)
            self.facts["tokens_per_second"] = self.facts.get("tokens", 0) / busy
            self.cache.write_json(STATUS, self.facts)
            self.written = now


class Producer:
    """Fills one cache from one stream."""

    def __init__(self, directory: Path) -> None:
        self.cache = BlockCache(directory)
        settings = self.cache.read_json(DEFINITION)
        self.definition = StreamDefinition.from_json(settings["definition"])
        self.position = Position(*settings["position"])
        self.start = int(settings["start"])
        self.ranks, self.limit, self.workers = (int(settings[key]) for key in ("ranks", "cache_limit", "workers"))
        self.status = Status(self.cache)
        self.kept: deque[Block] = deque()

    def run(self) -> None:
        """Write blocks for ever."""
        self.cache.make_readers(self.ranks, self.start)
        reader = StreamReader(self.definition, self.cache.directory, self.status.tell)
        tokenizer = self.cache.read_json(TOKENIZER)
        begin = (self.definition, None if tokenizer is None else TextEncoder(**tokenizer))
        tokens = self.position.tokens
        with ProcessPoolExecutor(self.workers, get_context("fork"), begin_worker, begin) as pool:
            for buffer, ids in self._with_tokens(tokenized(reader.buffers(self.position), pool, self.definition)):
                self._wait_for_room(tokens)
                self.kept.append(self.cache.write(Position(buffer.shard, buffer.row, tokens), ids))
                tokens += len(ids)
                self.status.tell(tokens=tokens - self.position.tokens, shards=buffer.shard)

    def _with_tokens(self, buffers: Iterator[tuple[Buffer, np.ndarray]]) -> Iterator[tuple[Buffer, np.ndarray]]:
        """Yield those that have tokens.

        Raises:
            DataError: a whole pass has none.
        """
        last, size = self.position.shard // len(self.definition.shards), len(self.definition.shards)
        for buffer, ids in buffers:
            if len(ids):
                last = buffer.shard // size
                yield buffer, ids
            elif buffer.shard // size > last + 1:
                raise DataError(
                    f"a pass through all {size} shards has no token to train on in its column "
                    f"{self.definition.column!r} (data.field), beside those that are held out; give a source with more"
                )

    def _wait_for_room(self, produced: int) -> None:
        """Remove what all readers have behind them; return once there is room, or a reader wants more."""
        readers, began = self.cache.readers(), time.monotonic()
        assert readers is not None
        while True:
            while self.kept and self.kept[0].end <= int(readers[:, 0].min()):
                self.kept.popleft().path.unlink(missing_ok=True)
            if produced < int(readers[:, 1].max()) or sum(4 * block.length for block in self.kept) < self.limit:
                break
            self.status.tell(stage="waiting for the ranks")
            time.sleep(POLL)
        self.status.idle += time.monotonic() - began


def tokenized(
    buffers: Iterator[Buffer], pool: ProcessPoolExecutor, definition: StreamDefinition
) -> Iterator[tuple[Buffer, np.ndarray]]:
    """Yield each buffer with the ids of its documents that train, in their order; those before an error come first."""
    waiting: deque[tuple[Buffer, list[Future[list[tuple[np.ndarray, bool]]]]]] = deque()
    error: DataError | None = None
    while error is None:
        try:
            buffer = next(buffers)
            waiting.append((buffer, [pool.submit(encode_values, part) for part in parts(buffer.values)]))
        except DataError as failure:
            error = failure
        while waiting and (error is not None or len(waiting) > AHEAD):
            buffer, futures = waiting.popleft()
            yield buffer, joined_tokens(buffer, [pair for future in futures for pair in future.result()], definition)
    raise error


def parts(values: list[Value]) -> Iterator[list[Value]]:
    """Cut the rows of a buffer for the workers."""
    part, size = list[Value](), 0
    for value in values:
        part.append(value)
        size += len(value)
        if size >= PART:
            yield part
            part, size = [], 0
    if part:
        yield part


def joined_tokens(buffer: Buffer, documents: list[tuple[np.ndarray, bool]], definition: StreamDefinition) -> np.ndarray:
    """Return the ids of the documents that train, in the buffer's order, the first of each complemented."""
    kept = []
    for place in definition.permutation(buffer.shard, buffer.row, len(documents)):
        ids, is_held_out = documents[place]
        if len(ids) and not is_held_out:
            kept += [~ids[:1], ids[1:]]
    return np.concatenate(kept) if kept else np.empty(0, dtype=np.int32)


def run_producer(directory: Path) -> None:
    """Produce until the parent says enough, or is gone; the cache goes too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    hold_lock(directory)
    watch = threading.Thread(target=_watch, args=(os.getppid(), directory), daemon=True)
    watch.start()
    with suppress(FileNotFoundError):  # the cache is gone: the watch has begun to end us
        BlockCache(directory).write_json(FAILURE, {"message": failure_of(Producer(directory))})
    watch.join()


def failure_of(producer: Producer) -> str:
    """Run a producer, and return what has ended it."""
    try:
        producer.run()
    except ShardwiseError as error:
        return str(error)
    except BrokenProcessPool:
        return "a worker process that tokenizes was killed, perhaps for memory; set fewer data.num_workers"
    except Exception:
        return f"its process failed: {traceback.format_exc()}"
    raise AssertionError("a producer runs for ever")


def _watch(parent: int, directory: Path) -> None:
    """End this process, its workers and the cache once the parent closes our standard input or is gone."""
    while os.getppid() == parent and not select.select([sys.stdin], [], [], WATCH)[0]:
        pass
    for worker in active_children():
        worker.kill()
    with suppress(FileNotFoundError):
        ending = directory.rename(f"{directory}{ENDING}")  # so that nothing is written into it any more
        shutil.rmtree(ending, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    run_producer(Path(sys.argv[1]))
