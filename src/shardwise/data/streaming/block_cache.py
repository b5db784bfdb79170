"""The cache of a running stream: a directory of blocks of tokens, written by one process and read by a host's ranks.

A block is the tokens of one buffer. Its name is `TOKENS-COUNT-SHARD-ROW.npy`: the tokens of the stream before it, how
many it has, and where the buffer begins. So the names are the position index. It is complete once it has its name.
Token ids are int32; the first of a document is stored as its bitwise complement.

Beside the blocks lie `definition.json` and `tokenizer.json`, which the producer begins with, its `status.json`, its
`failure.json` if it ends with an error, and `readers.npy`: of each local rank the token that its step begins with, and
the one up to which it wants to read. What lies before the former of all ranks is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwise.data.streaming.definition import Position

DEFINITION, TOKENIZER, STATUS, FAILURE = "definition.json", "tokenizer.json", "status.json", "failure.json"
READERS, LOCK = "readers.npy", "lock"
ENDING = ".ending"  # behind the name of a directory whose producer removes it


class Block(NamedTuple):
    """A complete block in the cache."""

    position: Position
    length: int
    path: Path

    @property
    def end(self) -> int:
        """The token behind its last one."""
        return self.position.tokens + self.length


class BlockCache:
    """One directory of blocks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def blocks(self) -> list[Block]:
        """Return the complete blocks in order."""
        blocks = []
        for path in self.directory.glob("[0-9]*-*-*-*.npy"):
            tokens, count, shard, row = map(int, path.stem.split("-"))
            blocks.append(Block(Position(shard, row, tokens), count, path))
        return sorted(blocks)

    def write(self, position: Position, tokens: np.ndarray) -> Block:
        """Keep a block."""
        name = f"{position.tokens:020d}-{len(tokens)}-{position.shard}-{position.row}.npy"
        block = Block(position, len(tokens), self.directory / name)
        with (self.directory / "writing").open("wb") as file:
            np.save(file, tokens, allow_pickle=False)
        (self.directory / "writing").replace(block.path)
        return block

    def write_json(self, name: str, content: Any) -> None:
        """Write a small file whole or not at all."""
        temporary = self.directory / f"{name}.writing"
        temporary.write_text(json.dumps(content))
        temporary.replace(self.directory / name)

    def read_json(self, name: str) -> Any:
        """Return what a small file holds; None where there is none."""
        try:
            return json.loads((self.directory / name).read_text())
        except FileNotFoundError:
            return None

    def make_readers(self, count: int, start: int) -> None:
        """Begin the table of readers, all of them at the token `start`."""
        temporary = self.directory / f"{READERS}.writing"
        with temporary.open("wb") as file:
            np.save(file, np.full((count, 2), start, dtype=np.int64), allow_pickle=False)
        temporary.replace(self.directory / READERS)

    def readers(self) -> np.ndarray | None:
        """Return the table of readers [R, 2], shared with other processes; None where there is none yet."""
        path = self.directory / READERS
        return np.load(path, mmap_mode="r+", allow_pickle=False) if path.is_file() else None


def hold_lock(directory: Path) -> int:
    """Return a file descriptor that marks the directory as in use by this process for as long as it is open."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def is_in_use(directory: Path) -> bool:
    """Return whether a process holds the directory's lock."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def sweep(root: Path, older_than: float = 60.0) -> None:
    """Remove directories below `root` that killed runs have left behind."""
    for directory in _directories(root):
        try:
            is_old = time.time() - directory.stat().st_mtime > older_than
        except FileNotFoundError:  # another run sweeps too
            continue
        if is_old and not is_in_use(directory):
            shutil.rmtree(directory, ignore_errors=True)


def _directories(root: Path) -> Iterator[Path]:
    yield from (path for path in root.iterdir() if path.is_dir())
