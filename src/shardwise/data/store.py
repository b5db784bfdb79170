"""Flat integer columns in memory-mapped Arrow files, and directories that are built once.

A column is one Arrow stream file with one row per number, in record batches of `ROWS` numbers, that
`datasets.Dataset.from_file` opens. (`save_to_disk` would cut it into record batches of 1000 rows; here a window of
tokens is a slice of one or two batches.) Opening reads batch headers only; workers of one host share the page cache.
"""

from __future__ import annotations

import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from shardwise.errors import DataError

ROWS = 1 << 20
COMPLETE = "shardwise.json"  # a cached directory without it is never used


class ColumnWriter(AbstractContextManager["ColumnWriter"]):
    """Writes a column; `length` and `digest` tell what was written."""

    def __init__(self, path: Path, dtype: type[np.integer[Any]]) -> None:
        self._schema = pa.schema([("value", pa.from_numpy_dtype(np.dtype(dtype)))])
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_stream(self._sink, self._schema)
        self._dtype = dtype
        self._waiting: list[np.ndarray] = []
        self._waiting_rows = 0
        self._hash = blake2b(digest_size=16)
        self.length = 0

    def extend(self, values: np.ndarray | Iterable[int]) -> None:
        """Append numbers."""
        array = np.asarray(values, dtype=self._dtype)
        self._waiting.append(array)
        self._waiting_rows += len(array)
        self.length += len(array)
        if self._waiting_rows >= ROWS:
            self._write()

    def _write(self) -> None:
        if self._waiting_rows:
            array = np.concatenate(self._waiting)
            self._hash.update(array.tobytes())
            self._writer.write_batch(pa.record_batch([pa.array(array)], schema=self._schema))
        self._waiting, self._waiting_rows = [], 0

    @property
    def digest(self) -> str:
        """Hash of the numbers written so far; final once the writer is closed."""
        return self._hash.hexdigest()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._write()
        self._writer.close()
        self._sink.close()


class Column:
    """A memory-mapped column of integers. Pickles as its path."""

    def __init__(self, path: Path) -> None:
        from datasets import Dataset  # slow to import; not needed for a plan or a factory's data set

        self.path = path
        try:
            chunks = Dataset.from_file(str(path)).data.column(0).chunks
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"cached data {path} cannot be read ({error}); delete {path.parent}") from error
        self._chunks = [chunk.to_numpy(zero_copy_only=True) for chunk in chunks]
        ends = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)
        self._starts = [0, *ends.tolist()]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> int:
        chunk = bisect_right(self._starts, index) - 1
        return int(self._chunks[chunk][index - self._starts[chunk]])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Numbers start … stop - 1; a view of the file where they lie in one record batch."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{start}:{stop} of {len(self)} values in {self.path}")
        pieces = []
        chunk = bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[chunk + 1])
            offset = self._starts[chunk]
            pieces.append(self._chunks[chunk][start - offset : end - offset])
            start, chunk = end, chunk + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def __reduce__(self) -> tuple[type[Column], tuple[Path]]:
        return Column, (self.path,)


def digest(*parts: object) -> str:
    """Key of a cached directory."""
    return blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def build_once(directory: Path, build: Callable[[Path], None], say: Callable[[str], None]) -> None:
    """Make `directory` by `build(temporary directory)`, unless it is complete; other processes of this host wait.

    `build` writes the file `COMPLETE` last. The result is moved into place whole, so that a killed build leaves
    nothing that is used.
    """
    if (directory / COMPLETE).is_file():
        return
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{directory}.lock")
        with _acquire(lock, directory, say):
            if not (directory / COMPLETE).is_file():
                _build(directory, build)
    except OSError as error:
        raise DataError(
            f"the cache {directory.parent} cannot be written ({error}); set data.cache_directory to one that can"
        ) from error


def _acquire(lock: FileLock, directory: Path, say: Callable[[str], None]) -> AbstractContextManager[Any]:
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        say(f"waiting for another process that prepares {directory}")
        return lock.acquire()


def _build(directory: Path, build: Callable[[Path], None]) -> None:
    prefix = f"{directory.name}.building-"
    for left_over in directory.parent.glob(f"{prefix}*"):  # of a build that was killed: we hold the lock
        shutil.rmtree(left_over)
    if directory.exists():
        shutil.rmtree(directory)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    try:
        build(temporary)
        temporary.chmod(0o755)
        temporary.replace(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
