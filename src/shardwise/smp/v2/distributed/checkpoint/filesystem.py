"""Torch's file system storage of checkpoints, in a directory or in S3, whose metadata is read without trust.

Torch's metadata is a pickle, which is written for torch's own reader. Beside it stands the same as JSON, and that is
what is read here. Where torch's own writer was at work the pickle alone is there: it is walked, not unpickled. What is
not a tensor is read with `weights_only=True`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata

from shardwise._torch_compat.fsdp1 import set_state_element
from shardwise.errors import CheckpointError, ConfigError
from shardwise.smp.v2.distributed.checkpoint import torch_metadata
from shardwise.smp.v2.distributed.checkpoint.metadata import FILE, from_text, to_text
from shardwise.smp.v2.distributed.checkpoint.s3_filesystem import S3FileSystem, is_s3_uri

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:/", re.IGNORECASE)
Hook = Callable[["DistributedFileSystemWriter"], Any]


def path_to_file_system(path: Any, s3_region: str | None = None, s3client_config: Any = None) -> FileSystemBase:
    """Return the file system of a path or address: an S3FileSystem, or torch's of this machine.

    Raises:
        ConfigError: it is an address elsewhere.
        CheckpointError: it is in S3 and s3fs is not installed.
    """
    if is_s3_uri(path):
        files = S3FileSystem(s3_region, s3client_config)
        files.init_path(path)
        return files
    if _SCHEME.match(str(path)):
        raise ConfigError(f"{path} is neither a directory nor in S3, where this API writes; give one of these")
    return FileSystem()


class DistributedFileSystemWriter(FileSystemWriter):
    """Writes one file for each rank, and the metadata.

    Args:
        path: a directory, or an address in S3.
        pre_write_hooks, post_write_hooks: called with the writer before and after this rank's file is written.
        s3_region, s3client_config: of `S3FileSystem`.
        settings: of torch's FileSystemWriter.
    """

    def __init__(
        self,
        path: str | Path,
        pre_write_hooks: Iterable[Hook] | None = None,
        post_write_hooks: Iterable[Hook] | None = None,
        s3_region: str | None = None,
        s3client_config: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(str(path), **settings)
        self.fs = path_to_file_system(path, s3_region, s3client_config)  # type: ignore[assignment]
        self.path = self.fs.init_path(path)
        self.before, self.after = list(pre_write_hooks or []), list(post_write_hooks or [])
        self.is_coordinator = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by torch; hooks ask whether this rank is the one that writes the metadata."""
        self.is_coordinator = is_coordinator
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(self, plan: Any, planner: Any) -> Any:
        for hook in self.before:
            hook(self)
        written = super().write_data(plan, planner)
        for hook in self.after:
            hook(self)
        return written

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Writes the metadata, once all ranks' files are there."""
        super().finish(metadata, results)
        places = {written.index: written.storage_data for of_rank in results for written in of_rank}
        with self.fs.create_stream(self.fs.concat_path(self.path, FILE), "wb") as stream:
            stream.write(to_text(replace(metadata, storage_data=places)).encode())


class DistributedFileSystemReader(FileSystemReader):
    """Reads what DistributedFileSystemWriter has written, or torch's own FileSystemWriter."""

    def __init__(self, path: str | Path, s3_region: str | None = None, s3client_config: Any = None, **settings: Any):
        super().__init__(str(path), **settings)
        self.fs = path_to_file_system(path, s3_region, s3client_config)  # type: ignore[assignment]
        self.path = self.fs.init_path(path)
        self.problem: CheckpointError | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata. Raises CheckpointError where there is none, or it is none of ours."""
        file = self.fs.concat_path(self.path, FILE)
        try:
            torchs = self.fs.concat_path(self.path, torch_metadata.FILE)
            if not self.fs.exists(file) and self.fs.exists(torchs):
                file = torchs
            with self.fs.create_stream(file, "rb") as stream:
                content = stream.read()
            if file == torchs:
                return torch_metadata.from_pickle(content, self.load_id)
            return from_text(content.decode(), self.load_id)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            self.problem = CheckpointError(f"{file} cannot be read: {error}; give a directory of a finished save")
            raise self.problem from error


def first_failure(error: CheckpointException) -> BaseException:
    """Return what went wrong on the first of the ranks that torch's error lists."""
    return next(iter(error.failures.values()))[0] if error.failures else error


class LoadPlanner(DefaultLoadPlanner):
    """Torch's planner; values that are no tensors are read with `weights_only=True`."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Load a value that is no tensor. Raises CheckpointError for one of another class than plain data."""
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except Exception as error:  # of pickle, which is not imported, or of torch
            raise CheckpointError(f"{name!r} of the checkpoint is no plain data: {error}") from error
        if self.flatten_state_dict:
            set_state_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded
