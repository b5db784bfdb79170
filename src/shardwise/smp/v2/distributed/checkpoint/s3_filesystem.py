"""Addresses in S3, which scripts take apart; reading and writing there is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shardwise.errors import ConfigError
from shardwise.smp.v2.distributed.checkpoint.filesystem import S3, path_to_file_system


def is_s3_uri(uri: Any) -> bool:
    """Whether it is `s3://…`."""
    return str(uri).startswith(S3)


def parse_s3_uri(uri: str) -> tuple[str, str]:
    """(bucket, key). Raises ConfigError for what is no such address."""
    bucket, _, key = uri.removeprefix(S3).partition("/")
    if not is_s3_uri(uri) or not bucket:
        raise ConfigError(f"{uri!r} must be s3://BUCKET/KEY")
    return bucket, key


def format_s3_path(bucket: str, key: str) -> str:
    """`s3://bucket/key`."""
    return f"{S3}{bucket}/{key.lstrip('/')}"


def get_s3_region_from_uri(uri: str) -> str | None:
    """None: asking for a bucket's region is a call to Amazon."""
    parse_s3_uri(uri)
    return None


def retry_with_jitter(function: Callable[..., Any], attempts: int = 3, seconds: float = 1.0) -> Callable[..., Any]:
    """`function`, called again after an OSError, `attempts` times in all."""

    def run(*args: Any, **kwargs: Any) -> Any:
        for attempt in range(attempts):
            try:
                return function(*args, **kwargs)
            except OSError:
                if attempt == attempts - 1:
                    raise
                time.sleep(seconds * 2**attempt)

    return run


class S3FileSystem:
    """Refused: see `path_to_file_system`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        path_to_file_system(f"{S3}{args[0] if args else ''}")
