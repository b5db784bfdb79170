"""Text files, compressed or not: their suffixes, streams of their text, and how much of them has been read.

gzip, bzip2 and xz are Python's own; zstandard comes with pyarrow. Used by `shardwise.data.readers`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import DataError

UTF_8 = "utf-8-sig"  # with or without a byte order mark
READ_BYTES = 1 << 17  # of a file at once
_hearer: ContextVar[Callable[[int], None] | None] = ContextVar("hearer", default=None)


@contextmanager
def reads_heard(hear: Callable[[int], None]) -> Iterator[None]:
    """Let `hear` be called with each further number of bytes of a file that is read, as they lie on the disk."""
    token = _hearer.set(hear)
    try:
        yield
    finally:
        _hearer.reset(token)


def tell_read(count: int) -> None:
    """Tell who wants to hear of it that so many bytes of a file have been read."""
    hear = _hearer.get()
    if hear is not None:
        hear(count)


class HeardFile(io.FileIO):
    """A file that tells of what is read of it."""

    def readinto(self, buffer: Any, /) -> int | None:  # type: ignore[override]
        count = super().readinto(buffer)
        tell_read(count or 0)
        return count

    def read(self, size: int = -1, /) -> bytes | None:  # type: ignore[override]
        content = super().read(size)
        tell_read(len(content or b""))
        return content


def _buffered(path: Path) -> io.BufferedReader:
    return io.BufferedReader(HeardFile(path), READ_BYTES)  # type: ignore[arg-type]


def _open_zstandard(path: Path) -> Any:
    import pyarrow as pa

    if not pa.Codec.is_available("zstd"):
        raise DataError(
            f"{path} is compressed with zstandard, which this pyarrow was built without; use PyPI's pyarrow"
        )
    return pa.CompressedInputStream(pa.PythonFile(HeardFile(path), mode="r"), "zstd")


DECOMPRESSORS: dict[str, Callable[[Path], Any]] = {
    ".gz": lambda path: gzip.open(_buffered(path)),  # noqa: SIM115
    ".bz2": lambda path: bz2.open(_buffered(path)),  # noqa: SIM115
    ".xz": lambda path: lzma.open(_buffered(path)),  # noqa: SIM115
    ".zst": _open_zstandard,
    ".zstd": _open_zstandard,
}


def content_suffix(path: Path) -> str:
    """Return the suffix of a file without that of its compression, in small letters: `.jsonl` of `a.JSONL.gz`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in DECOMPRESSORS else suffix


@contextmanager
def opened_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Yield a stream of a file's text.

    Args:
        newline: as Python's `open` takes it.

    Raises:
        DataError: the file cannot be read, is not what its suffix says, ends too early, or is not UTF-8.
    """
    decompressor = DECOMPRESSORS.get(path.suffix.lower())
    try:
        if decompressor is None:
            with io.TextIOWrapper(_buffered(path), encoding=UTF_8, newline=newline) as stream:
                yield stream
        else:
            with decompressor(path) as content, io.TextIOWrapper(content, encoding=UTF_8, newline=newline) as stream:
                yield stream
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not valid UTF-8 ({error.reason}); convert it, or check data.format") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = getattr(error, "strerror", None) or str(error)
        damaged = "" if decompressor is None else f" as {path.suffix} file; it may be damaged or cut off"
        raise DataError(f"{path} cannot be read{damaged}: {why}; write it again") from error
