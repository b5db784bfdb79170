"""Files of arrays that a process has made of a part of a corpus, kept until the whole is there.

A part is written under another name first, and carries a hash of its bytes: after a kill, or after the machine's, the
next run takes those that are whole and makes the others again. Used by `shardwise.data.parallel_tokenize`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

HASH_BYTES = 16


def write_part(path: Path, arrays: Sequence[np.ndarray]) -> None:
    """Write arrays as one file, which is there whole or not at all."""
    content = io.BytesIO()
    for array in arrays:
        np.save(content, array, allow_pickle=False)
    written = content.getbuffer()
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(xxhash.xxh3_128(written).digest())
        file.write(written)
    temporary.replace(path)


def read_part(path: Path) -> list[np.ndarray] | None:
    """Return the arrays of a file; None where it is not there, or not whole."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if xxhash.xxh3_128(memoryview(content)[HASH_BYTES:]).digest() != content[:HASH_BYTES]:
        return None
    stream, arrays = io.BytesIO(content), []
    stream.seek(HASH_BYTES)
    while stream.tell() < len(content):
        arrays.append(np.load(stream, allow_pickle=False))
    return arrays
