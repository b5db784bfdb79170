"""Checkpoints in an object store, or in another of fsspec's file systems.

Nothing there can be renamed at once, so a checkpoint has its name from the beginning and is complete when its manifest
is there. Listings are asked for anew each time, because other ranks write too. Whatever a file system raises arrives as
an OSError, which is what the rest of the room expects of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, BinaryIO

from shardwise.checkpoint.manifest import BLOCK_BYTES, FILE, OWNER
from shardwise.errors import CheckpointError
from shardwise.words import nearest, without_password

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # scheme -> extra of this package


def open_remote(root: str) -> RemoteStore:
    """The store at a URL; makes nothing and asks nothing.

    Raises:
        CheckpointError: the URL holds a password, or its scheme is unknown, or the scheme's package is not installed.
    """
    return RemoteStore(root, *open_system(root))


def open_system(root: str, **settings: Any) -> tuple[Any, str]:
    """fsspec's file system of a URL, which gets `settings`, and the path in it; CheckpointError as `open_remote`."""
    import fsspec

    if (shown := without_password(root)) != root:  # it would stand in messages and in a run's job
        raise CheckpointError(
            f"checkpoint path {shown!r} holds a password; leave it to the environment or the "
            "configuration of fsspec's package for the scheme"
        )
    scheme = root.partition("://")[0]
    if scheme not in fsspec.available_protocols():
        common = {"s3", "gs", "az", "abfs", "memory", "file", "sftp", "hdfs"}
        raise CheckpointError(f"checkpoint path {root!r}: fsspec knows no scheme {scheme!r}.{nearest(scheme, common)}")
    try:
        system, path = fsspec.core.url_to_fs(root, **settings)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        how = f"`pip install 'shardwise[{extra}]'`" if extra else "install it"
        raise CheckpointError(
            f"checkpoint path {root!r}: the package for the scheme {scheme!r} is missing ({error}); {how}, or use a "
            "local directory"
        ) from None
    except Exception as error:
        raise CheckpointError(f"checkpoint path {root!r} cannot be opened: {type(error).__name__}: {error}") from error
    return system, path


class RemoteStore:
    """Checkpoints under a path of an fsspec file system; a `Store`."""

    def __init__(self, root: str, system: Any, path: str) -> None:
        self.root = root
        self._system, self._path = system, path.rstrip("/")
        self._replaced: dict[str, list[str]] = {}  # files of the complete checkpoint of a name that is saved again

    def claim(self, run: str) -> None:
        with os_errors():
            self._make_directory(self._path)
            self._system.pipe_file(self._at(OWNER), run.encode())

    def owner(self) -> str:
        try:
            return self._content(self._at(OWNER)).decode()
        except FileNotFoundError:
            return ""

    def names(self) -> list[str]:
        entries = self._entries(self._path)
        return sorted(_last(entry) for entry in entries if entry["type"] == "directory")

    def unfinished(self) -> list[str]:
        return []  # they have their names from the beginning

    def begin(self, name: str) -> str:
        with os_errors():
            self._system.invalidate_cache()
            if self._system.exists(self._at(name, FILE)):
                return self._begin_beside(name)
        self.remove(name)
        with os_errors():
            self._make_directory(self._at(name))
        return ""

    def _begin_beside(self, name: str) -> str:
        self._replaced[name] = files = [file for file in self.sizes(name) if file != FILE]
        stems = [file.rpartition(".")[0] for file in files]
        return next(f"-{n}" for n in count(2) if not any(stem.endswith(f"-{n}") for stem in stems))

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[BinaryIO]:
        with os_errors():
            handle = self._system.open(self._at(name, file), "wb")
        try:
            yield _File(handle)  # type: ignore[misc]
        except BaseException:
            _throw_away(handle)
            raise
        with os_errors():
            handle.close()

    def commit(self, name: str, manifest: bytes) -> None:
        with os_errors():
            self._system.pipe_file(self._at(name, FILE), manifest)
        for file in self._replaced.pop(name, []):
            with suppress(Exception):  # it is in nobody's way
                self._system.rm_file(self._at(name, file))

    def read(self, name: str, file: str) -> bytes:
        return self._content(self._at(name, file))

    def open(self, name: str, file: str) -> BinaryIO:
        with os_errors():  # what is read is a block; its successor is often wanted too
            handle: Any = self._system.open(self._at(name, file), "rb", block_size=2 * BLOCK_BYTES)
        return _File(handle)  # type: ignore[return-value]

    def sizes(self, name: str) -> dict[str, int]:
        entries = self._entries(self._at(name), missing_ok=False)
        return {_last(entry): entry["size"] for entry in entries if entry["type"] == "file"}

    def remove(self, name: str) -> None:
        with os_errors():
            with suppress(FileNotFoundError):
                self._system.rm_file(self._at(name, FILE))
            self._remove_files(name)

    def abandon(self, name: str) -> None:
        with os_errors():
            if not self._system.exists(self._at(name, FILE)):
                self._remove_files(name)

    def _remove_files(self, name: str) -> None:
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            self._system.rm(self._at(name), recursive=True)

    def _make_directory(self, path: str) -> None:
        """Object stores, fsspec's asynchronous file systems, have none; s3fs would make a bucket of a misspelt name."""
        if not self._system.async_impl:
            self._system.makedirs(path, exist_ok=True)

    def _entries(self, path: str, missing_ok: bool = True) -> list[dict[str, Any]]:
        with os_errors():
            self._system.invalidate_cache()
            try:
                entries: list[dict[str, Any]] = self._system.ls(path, detail=True)
            except FileNotFoundError:
                if missing_ok:
                    return []
                raise
            return entries

    def _content(self, path: str) -> bytes:
        with os_errors():
            content: bytes = self._system.cat_file(path)
            return content

    def _at(self, *parts: str) -> str:
        return "/".join((self._path, *parts))


class _File:
    """An open file whose errors are OSErrors."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def write(self, block: memoryview) -> int:
        with os_errors():
            count: int = self._handle.write(block)
            return count

    def seek(self, position: int) -> None:
        with os_errors():
            self._handle.seek(position)

    def readinto(self, target: memoryview) -> int:
        with os_errors():
            count: int = self._handle.readinto(target)
            return count

    def close(self) -> None:
        with suppress(Exception):
            self._handle.close()


def _last(entry: dict[str, Any]) -> str:
    """The last part of an entry's path."""
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _throw_away(handle: Any) -> None:
    """An object store keeps a file only once it is closed; fsspec closes what is collected unless it thinks it is."""
    with suppress(Exception):
        handle.discard()
    with suppress(Exception):
        handle.closed = True


@contextmanager
def os_errors() -> Iterator[None]:
    """Errors of the packages below fsspec, such as botocore's, are of no common kind."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
