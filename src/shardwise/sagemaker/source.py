"""The user's files: which of them travel, and the archive that they travel in."""

from __future__ import annotations

import fnmatch
import gzip
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.words import nearest_file

IGNORED = (".env", ".git", "__pycache__", ".DS_Store", ".cache", ".ipynb_checkpoints")
LARGEST = 2**30  # bytes of files that travel with a job; data belongs into channels


@dataclass(frozen=True)
class SourceFiles:
    """An entry point with the files around it.

    Attributes:
        entry_point: relative to `directory`; None: a command of the user's says what runs.
        directory: of this machine, or the URI of an archive in S3; None: the entry point alone.
        dependencies: further files and directories, put beside the entry point.
        ignored: patterns of names that stay here.
    """

    entry_point: str | None
    directory: str | None = None
    dependencies: Sequence[str] = ()
    ignored: Sequence[str] = IGNORED

    @property
    def is_remote(self) -> bool:
        """True where the files are in S3 already."""
        return self.directory is not None and self.directory.startswith("s3://")

    @property
    def program(self) -> str | None:
        """The entry point as the container finds it in its directory of code."""
        if self.entry_point is None:
            return None
        return self.entry_point if self.directory is not None else Path(self.entry_point).name

    def check(self) -> None:
        """Refuse an entry point or a directory that is not there.

        Raises:
            ConfigError: with the nearest name.
        """
        if self.is_remote:
            return
        if self.directory is not None and not Path(self.directory).exists():
            raise ConfigError(f"source_dir={self.directory!r} does not exist.{nearest_file(Path(self.directory))}")
        if self.entry_point is not None and not _is_archive(self.directory):
            path = self._root() / self.entry_point if self.directory is not None else Path(self.entry_point)
            if not path.is_file():
                raise ConfigError(f"entry_point={self.entry_point!r} is not a file.{nearest_file(path)}")
        for dependency in self.dependencies:
            if not Path(dependency).exists():
                raise ConfigError(f"dependencies: {dependency!r} does not exist.{nearest_file(Path(dependency))}")

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield the files that travel, by their names in the container."""
        if self.directory is not None:
            yield from self._below(self._root(), Path())
        elif self.entry_point is not None:
            yield Path(self.entry_point).name, Path(self.entry_point)
        for dependency in map(Path, self.dependencies):
            if dependency.is_dir():
                yield from self._below(dependency, Path(dependency.absolute().name))
            else:
                yield dependency.name, dependency

    def archive(self) -> bytes:
        """Return the files as a compressed archive; equal files make equal archives.

        Raises:
            ConfigError: they are too large.
        """
        if self.directory is not None and _is_archive(self.directory):
            return Path(self.directory).read_bytes()
        members = sorted(self.files())
        size = sum(path.stat().st_size for _, path in members)
        if size > LARGEST:
            raise ConfigError(f"source_dir holds {size / 2**30:.1f} GiB; put data into a channel of `fit(inputs=...)`")
        packed = io.BytesIO()
        zipped = gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6, mtime=0)
        with zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
            for name, path in members:
                member = tarfile.TarInfo(name)
                member.size, member.mode = path.stat().st_size, path.stat().st_mode & 0o777
                with path.open("rb") as content:
                    archive.addfile(member, content)
        return packed.getvalue()

    def _root(self) -> Path:
        assert self.directory is not None
        return Path(self.directory).expanduser()

    def _below(self, directory: Path, prefix: Path) -> Iterator[tuple[str, Path]]:
        for entry in sorted(directory.iterdir()):
            if any(fnmatch.fnmatch(entry.name, pattern) for pattern in self.ignored):
                continue
            if entry.is_dir():
                yield from self._below(entry, prefix / entry.name)
            else:
                yield (prefix / entry.name).as_posix(), entry


def _is_archive(directory: str | None) -> bool:
    return directory is not None and directory.endswith((".tar.gz", ".tgz"))
