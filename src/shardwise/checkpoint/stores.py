"""Stores of checkpoints: a local directory, or anything that fsspec reaches. The only code that names their files.

A store holds checkpoints by name. One that is being written is committed by its manifest, which comes last; on a local
disk it also has another name until then (`.NAME.partial`), as has one of the same step that it replaces (`.NAME.old`),
and files and directories are synced before the rename. remote.py has the store for everything that is not a local disk.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from shardwise.checkpoint.manifest import FILE, OWNER
from shardwise.job.schema import Job

_OLD = ".old"  # ending of a checkpoint whose step is saved again, between two renames
DIRECTORY = "checkpoints"  # in the output directory, where the job names no other


class ReadableStore(Protocol):
    """Files of checkpoints under one root."""

    root: str

    def open(self, name: str, file: str) -> BinaryIO:
        """A file for reading, seekable. Raises OSError."""
        ...


class Store(ReadableStore, Protocol):
    """Checkpoints under one root, by name."""

    def claim(self, run: str) -> None:
        """Note that `run` writes here from now on."""
        ...

    def owner(self) -> str:
        """The run that writes here, or "". Raises OSError where that cannot be told."""
        ...

    def names(self) -> list[str]:
        """Everything that has the place of a checkpoint, complete or not, sorted."""
        ...

    def unfinished(self) -> list[str]:
        """Other names of checkpoints that are being written, or were when their run was killed; sorted."""
        ...

    def begin(self, name: str) -> str:
        """Make the place of a new checkpoint; what a killed run left there goes.

        A complete checkpoint of this name stays until the new one is committed. Where both lie in one place, files of
        the new one have the returned ending, ahead of that of their kind.
        """
        ...

    def create(self, name: str, file: str) -> Any:
        """Context manager: a new binary file of a checkpoint that has begun, durable once it is closed."""
        ...

    def commit(self, name: str, manifest: bytes) -> None:
        """Write the manifest, which makes the checkpoint complete."""
        ...

    def read(self, name: str, file: str) -> bytes:
        """A whole file. Raises OSError."""
        ...

    def sizes(self, name: str) -> dict[str, int]:
        """Bytes of each file of a checkpoint."""
        ...

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        ...

    def abandon(self, name: str) -> None:
        """Remove what a failed write left of a checkpoint that was never committed."""
        ...


def open_store(root: str) -> Store:
    """The store at a directory or URL; makes nothing.

    Raises:
        CheckpointError: the URL holds a password, its scheme is unknown or its package is not installed.
    """
    if "://" not in root:
        return LocalStore(root)
    from shardwise.checkpoint.remote import open_remote

    return open_remote(root)


def checkpoint_store(job: Job) -> Store:
    """Return the store of the checkpoints of `job`."""
    return open_store(job.checkpoint.directory or f"{job.output}/{DIRECTORY}")


def split(path: str) -> tuple[str, str]:
    """Root and name of the checkpoint at `path`, a directory or URL."""
    scheme, separator, rest = path.rpartition("://")
    parent, _, name = rest.rstrip("/").rpartition("/")
    if separator:
        return f"{scheme}://{parent}", name
    return (parent or ("/" if path.startswith("/") else ".")), name


class LocalStore:
    """Checkpoints as directories of a local or shared file system."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._path = Path(root)

    def claim(self, run: str) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        (self._path / OWNER).write_text(run)

    def owner(self) -> str:
        try:
            return (self._path / OWNER).read_text()
        except FileNotFoundError:
            return ""

    def names(self) -> list[str]:
        if not self._path.is_dir():
            return []
        entries = {entry.name for entry in self._path.iterdir() if entry.is_dir()}
        replaced = {name[1:].removesuffix(_OLD) for name in entries if name.startswith(".") and name.endswith(_OLD)}
        return sorted({name for name in entries if not name.startswith(".")} | replaced)

    def unfinished(self) -> list[str]:
        return sorted(entry.name for entry in self._path.glob(".*.partial"))

    def begin(self, name: str) -> str:
        partial = self._partial(name)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return ""

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[BinaryIO]:
        with NewFile(self._partial(name) / file) as handle:
            yield handle  # type: ignore[misc]
            os.fsync(handle.fileno())

    def commit(self, name: str, manifest: bytes) -> None:
        partial = self._partial(name)
        with self.create(name, FILE) as handle:
            handle.write(manifest)
        _sync_directory(partial)
        place, old = self._path / name, self._old(name)
        if os.path.lexists(place):  # one of the same step, which is saved again
            _remove(old)  # of a run that was killed behind both renames: nothing could be renamed to it
            place.rename(old)
        partial.rename(place)
        _remove(old)
        _sync_directory(self._path)

    def read(self, name: str, file: str) -> bytes:
        return (self._place(name) / file).read_bytes()

    def open(self, name: str, file: str) -> BinaryIO:
        return (self._place(name) / file).open("rb", buffering=0)  # type: ignore[return-value]

    def sizes(self, name: str) -> dict[str, int]:
        return {entry.name: entry.stat().st_size for entry in self._place(name).iterdir() if entry.is_file()}

    def remove(self, name: str) -> None:
        _remove(self._old(name))
        _remove(self._path / name)

    def abandon(self, name: str) -> None:
        shutil.rmtree(self._partial(name), ignore_errors=True)

    def _partial(self, name: str) -> Path:
        return self._path / f".{name}.partial"

    def _old(self, name: str) -> Path:
        return self._path / f".{name}{_OLD}"

    def _place(self, name: str) -> Path:
        """Return the place of a checkpoint: one that a killed run was replacing still has its other name."""
        place, old = self._path / name, self._old(name)
        return old if old.exists() and not os.path.lexists(place) else place


class NewFile(io.FileIO):
    """A new file, written around the page cache as long as writes fill whole pages and come from aligned memory.

    That takes next to no processor time, which is training's, and leaves in the cache what training reads. A file
    system that cannot do it refuses, on the switch or on the write, and is written to as usual.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb")
        self._direct, self._possible = False, hasattr(os, "O_DIRECT")

    def write(self, data: Any) -> int:
        self._switch(self._possible and len(data) % mmap.PAGESIZE == 0 and self.tell() % mmap.PAGESIZE == 0)
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        self._possible = False
        self._switch(False)
        return super().write(data)

    def _switch(self, direct: bool) -> None:
        if direct == self._direct:
            return
        import fcntl  # there where O_DIRECT is

        flags = fcntl.fcntl(self.fileno(), fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self.fileno(), fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        except OSError:
            self._possible = False
        else:
            self._direct = direct


def _remove(path: Path) -> None:
    """Remove a checkpoint, its manifest first."""
    if path.is_symlink():  # to a place that its owner chose, where it stays
        return path.unlink()
    with suppress(OSError):
        (path / FILE).unlink()
    shutil.rmtree(path, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
