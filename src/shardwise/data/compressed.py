"""Text files, compressed or not: their suffixes, and streams of their text.

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
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import DataError

UTF_8 = "utf-8-sig"  # with or without a byte order mark


def _open_zstandard(path: Path) -> Any:
    import pyarrow as pa

    if not pa.Codec.is_available("zstd"):
        raise DataError(
            f"{path} is compressed with zstandard, which this pyarrow was built without; use PyPI's pyarrow"
        )
    return pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd")


DECOMPRESSORS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
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
            with path.open(encoding=UTF_8, newline=newline) as stream:
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
