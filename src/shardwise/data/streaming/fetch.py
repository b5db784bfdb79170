"""A shard as a local file: itself, or fetched from where fsspec finds it, for as long as it is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.data.remote_tokens import is_url
from shardwise.data.streaming.definition import Shard
from shardwise.errors import DataError

CHUNK = 1 << 20
PAUSES = (1.0, 2.0)  # seconds behind a try that failed, before the next


def local_stamp(path: Path) -> tuple[int, str]:
    """Return (bytes, time of change) of a local file."""
    status = path.stat()
    return status.st_size, str(status.st_mtime_ns)


def remote_stamp(info: dict[str, Any]) -> tuple[int, str]:
    """Return (bytes, what tells versions apart) from what fsspec knows of a file."""
    of_content = ("ETag", "etag", "blob_id", "lfs", "md5Hash", "Content-MD5", "Digest")
    of_time = ("LastModified", "Last-Modified", "last_modified", "mtime", "last_commit")
    version = next((info[key] for key in (*of_content, *of_time) if info.get(key)), "")
    return int(info.get("size") or 0), str(version)


@contextmanager
def fetched_shard(shard: Shard, directory: Path, tell: Callable[..., None]) -> Iterator[Path]:
    """Yield the path of a shard's file; `tell` hears of how it comes.

    Raises:
        DataError: it is gone, has changed since it was listed, or does not come.
    """
    try:
        if not is_url(shard.url):
            _check_same(shard, local_stamp(Path(shard.url)))
            yield Path(shard.url)
            return
        path = directory / f"shard{Path(shard.name).name}"
        _fetch_in_tries(shard, path, tell)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    except FileNotFoundError as error:
        raise DataError(f"{shard.name} has vanished: {shard.url} is not there any more; bring it back") from error


def _fetch_in_tries(shard: Shard, path: Path, tell: Callable[..., None]) -> None:
    """Fetch a shard's file, again where that fails: a request that is lost need not end a run."""
    for pause in (*PAUSES, None):
        try:
            return _fetch(shard, path, tell)
        except (DataError, FileNotFoundError):
            raise
        except Exception as error:  # each file system of fsspec has errors of its own
            if pause is None:
                reason = str(error).strip() or type(error).__name__
                raise DataError(
                    f"{shard.name} cannot be fetched from {shard.url}: {reason}; is its server there?"
                ) from error
            time.sleep(pause)


def _fetch(shard: Shard, path: Path, tell: Callable[..., None]) -> None:
    from fsspec.core import url_to_fs

    system, inner = url_to_fs(shard.url)
    _check_same(shard, remote_stamp(system.info(inner)))
    began, size = time.monotonic(), 0
    tell(stage="fetching", fetched=0, size=shard.size, fetch_seconds=0.0)
    with system.open(inner, "rb") as source, path.open("wb") as target:
        while content := source.read(CHUNK):
            target.write(content)
            size += len(content)
            tell(stage="fetching", fetched=size, size=shard.size, fetch_seconds=time.monotonic() - began)


def _check_same(shard: Shard, version: tuple[int, str]) -> None:
    if version != (shard.size, shard.stamp):
        raise DataError(
            f"{shard.name} has changed since it was listed: {version[0]} bytes, version {version[1]}, not {shard.size} "
            f"bytes, version {shard.stamp}; leave sources as they are while they are read, and start again"
        )
