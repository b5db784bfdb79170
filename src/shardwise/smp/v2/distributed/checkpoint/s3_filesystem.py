"""Checkpoints in S3, through fsspec: addresses, and the file system that torch's checkpoint storage writes to.

Scripts take addresses apart themselves, list a directory through `S3FileSystem.fs`, and call what may fail again.
"""

from __future__ import annotations

import functools
import io
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase

from shardwise.checkpoint.remote import open_system, os_errors
from shardwise.errors import ConfigError

PART_BYTES = 64 * 2**20  # of an upload, as in SMP
_ADDRESS = re.compile(r"s3:/{1,2}(?P<bucket>[^/]+)(?:/(?P<key>.*))?", re.DOTALL)  # pathlib makes one slash of two


def is_s3_uri(uri: Any) -> bool:
    """Tell if it is `s3://…`; a `Path` made of that too."""
    return str(uri).startswith("s3:/")


def parse_s3_uri(uri: Any) -> tuple[str, str]:
    """(bucket, key). Raises ConfigError for what is no such address."""
    match = _ADDRESS.fullmatch(str(uri))
    if match is None:
        raise ConfigError(f"{str(uri)!r} must be s3://BUCKET/KEY")
    return match["bucket"], match["key"] or ""


def format_s3_path(path: Any) -> str:
    """`s3://BUCKET/KEY` of an address, which may be a `Path`. Raises ConfigError as `parse_s3_uri`."""
    return "s3://" + "/".join(part for part in parse_s3_uri(path) if part)


def get_s3_region_from_uri(uri: Any) -> str:
    """The region of the address's bucket, which S3 is asked for. Raises ConfigError, and OSError where S3 refuses."""
    bucket, _ = parse_s3_uri(uri)
    files = S3FileSystem()
    files.init_path(uri)
    with os_errors():
        # Buckets of the oldest region have no constraint on it.
        return files.fs.call_s3("get_bucket_location", Bucket=bucket).get("LocationConstraint") or "us-east-1"


def retry_with_jitter(function: Any, attempts: int = 3, seconds: float = 1.0) -> Any:
    """`function`, or static method, called again after an OSError, `attempts` times in all.

    Between attempts it waits half to all of `seconds`, then of twice as many, and so on.
    """
    if isinstance(function, staticmethod):
        return staticmethod(retry_with_jitter(function.__func__, attempts, seconds))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        for attempt in range(attempts):
            try:
                return function(*args, **kwargs)
            except OSError:
                if attempt == attempts - 1:
                    raise
                time.sleep(seconds * 2**attempt * random.uniform(0.5, 1))

    return run


class S3FileSystem(FileSystemBase):
    """A file system of S3, as torch's checkpoint storage asks for one. Errors are OSErrors.

    Args:
        region: of the bucket; unset: the environment's.
        s3client_config: an object with any of the attributes `part_size` (bytes), `max_attempts`, `profile`, `unsigned`
            and `force_path_style`; `throughput_target_gbps` has no effect.

    Attributes:
        fs: fsspec's file system, once `init_path` was called.
    """

    def __init__(self, region: str | None = None, s3client_config: Any = None) -> None:
        self.fs: Any = None
        self._settings = _settings(region, s3client_config)

    def init_path(self, path: Any) -> str:
        """The address in full; CheckpointError where s3fs is not installed."""
        address = format_s3_path(path)
        self.fs, _ = open_system(address, **self._settings)
        return address

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """An open file; one that is written is there when all of it is."""
        with os_errors():
            stream = self.fs.open(format_s3_path(path), mode)
        try:
            yield stream
        except BaseException:
            with suppress(Exception):
                stream.discard()
            stream.closed = True  # or its end would finish the upload
            raise
        with os_errors():
            stream.close()

    def concat_path(self, path: Any, suffix: str) -> str:
        """`path/suffix`."""
        return f"{format_s3_path(path)}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        """A copy, of which the first is removed: S3 has no names to change."""
        with os_errors():
            self.fs.mv(format_s3_path(path), format_s3_path(new_path))

    def mkdir(self, path: Any) -> None:
        """Nothing: S3 has no directories, and s3fs would make a bucket of a misspelt name."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Tell if it is an address in S3."""
        return is_s3_uri(checkpoint_id)

    def exists(self, path: Any) -> bool:
        """Tell if the file is there now."""
        with os_errors():
            self.fs.invalidate_cache()
            return bool(self.fs.exists(format_s3_path(path)))

    def rm_file(self, path: Any) -> None:
        """Remove a file."""
        with os_errors():
            self.fs.rm_file(format_s3_path(path))


def _settings(region: str | None, config: Any) -> dict[str, Any]:
    """s3fs's names of what a script has set."""

    def asked(name: str) -> Any:
        return getattr(config, name, None)

    client: dict[str, Any] = {"retries": {"max_attempts": asked("max_attempts")}} if asked("max_attempts") else {}
    if asked("force_path_style"):
        client["s3"] = {"addressing_style": "path"}
    settings = {
        "default_block_size": asked("part_size") or PART_BYTES,
        "anon": asked("unsigned"),
        "profile": asked("profile"),
        "config_kwargs": client,
        "client_kwargs": {"region_name": region} if region else {},
    }
    return {name: value for name, value in settings.items() if value}
