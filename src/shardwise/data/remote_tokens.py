"""Directories of tokens behind a URL that fsspec opens: written file by file, and fetched once into the cache.

Nothing there can be renamed, so a directory is complete when its manifest is there, which comes last.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from shardwise.cache import cache_root
from shardwise.data.store import COMPLETE, build_once, digest
from shardwise.errors import ConfigError, DataError
from shardwise.words import without_password

FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk


def is_url(path: str) -> bool:
    """Return whether a path is behind fsspec rather than on this host."""
    return "://" in path


def refuse_password(url: str) -> None:
    """Refuse a URL with a password: it would stand in every message, and in what a run writes down.

    Raises:
        ConfigError: without the password.
    """
    if (shown := without_password(url)) != url:
        raise ConfigError(
            f"data.path={shown!r} holds a password; leave it to the environment or the configuration of fsspec's "
            "package for the scheme"
        )


@cache
def fetched(url: str, cache_directory: str | None) -> Path | None:
    """Return the directory in the cache with what is at `url`; None where there is no manifest."""
    with _named(url):
        system, root = _open(url)
        if not system.exists(f"{root}/{COMPLETE}"):
            return None
        manifest = system.cat_file(f"{root}/{COMPLETE}")
        directory = cache_root(cache_directory) / "shared" / digest(url, manifest)
        build_once(directory, lambda target: _fetch(system, root, manifest, target), lambda text: None)
    return directory


def _fetch(system: Any, root: str, manifest: bytes, target: Path) -> None:
    for name in json.loads(manifest)["shared"]["files"]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"{root}/{COMPLETE} names {name!r}, which is not below it; write it with data prepare")
        (target / name).parent.mkdir(exist_ok=True)
        _fetch_file(system, f"{root}/{name}", target / name)
    (target / COMPLETE).write_bytes(manifest)


def _fetch_file(system: Any, source: str, target: Path) -> None:
    """Copy one file into the cache; an error of its own but a full disk is of the source, and not of the cache."""
    try:
        system.get_file(source, str(target))
    except FileNotFoundError as error:
        raise DataError(f"{source} is missing; copy the directory there again") from error
    except OSError as error:
        if error.errno in FULL:
            raise
        raise DataError(
            f"{source} cannot be fetched: {type(error).__name__}: {error}; is its server there, and may this user read?"
        ) from error


def upload(directory: Path, url: str) -> None:
    """Write a directory of tokens to `url`, its manifest last."""
    with _named(url):
        system, root = _open(url)
        files = [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if path.is_file()]
        for name in sorted(files, key=lambda name: name == COMPLETE):
            if not system.async_impl:  # object stores have no directories
                system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            system.put_file(str(directory / name), f"{root}/{name}")


def is_taken(url: str) -> bool:
    """Return whether there is a complete directory of tokens at `url`."""
    with _named(url):
        system, root = _open(url)
        return bool(system.exists(f"{root}/{COMPLETE}"))


def _open(url: str) -> tuple[Any, str]:
    import fsspec

    refuse_password(url)
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    return system, root.rstrip("/")


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Name what the packages below fsspec raise, which is of no common kind."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:
        raise DataError(
            f"{url!r} cannot be reached: {type(error).__name__}: {error}; check the URL, its credentials and that "
            "fsspec's package for the scheme is installed (`pip install 'shardwise[s3]'`)"
        ) from error
