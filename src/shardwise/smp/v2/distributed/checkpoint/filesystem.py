"""Where distributed checkpoints lie: torch's file system storage, with metadata that is read without trusting it.

Torch's metadata is a pickle, which is written for torch's own reader. Beside it stands the same as JSON, and that is
what is read here. What is not a tensor is read with `weights_only=True`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from shardwise._torch_compat import set_state_element
from shardwise.errors import CheckpointError, ConfigError
from shardwise.smp.v2.distributed.checkpoint.metadata import FILE, from_text, to_text

Hook = Callable[[], Any]
S3 = "s3://"


def path_to_file_system(path: str | Path) -> str:
    """The path as a checkpoint's directory. Raises ConfigError for an S3 address."""
    if str(path).startswith(S3):
        raise ConfigError(
            f"{path} is in S3, where this API does not write; give a directory, or use `shardwise train` with "
            "checkpoint.directory in S3"
        )
    return str(path)


class DistributedFileSystemWriter(FileSystemWriter):
    """Writes one file for each rank, and the metadata. Hooks are called before and after a rank's file is written."""

    def __init__(
        self,
        path: str | Path,
        pre_write_hooks: Iterable[Hook] | None = None,
        post_write_hooks: Iterable[Hook] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(path_to_file_system(path), **settings)
        self.before, self.after = list(pre_write_hooks or []), list(post_write_hooks or [])

    def write_data(self, plan: Any, planner: Any) -> Any:
        for hook in self.before:
            hook()
        written = super().write_data(plan, planner)
        for hook in self.after:
            hook()
        return written

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Writes the metadata, once all ranks' files are there."""
        super().finish(metadata, results)
        places = {one.index: one.storage_data for of_rank in results for one in of_rank}
        (Path(self.path) / FILE).write_text(to_text(replace(metadata, storage_data=places)), encoding="utf-8")


class DistributedFileSystemReader(FileSystemReader):
    """Reads what DistributedFileSystemWriter has written; what torch's own has written torch's own reads."""

    def __init__(self, path: str | Path, **settings: Any) -> None:
        super().__init__(path_to_file_system(path), **settings)
        self.problem: CheckpointError | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CheckpointError where there is none, or it is none of ours."""
        file = Path(self.path) / FILE
        try:
            return from_text(file.read_text(encoding="utf-8"), self.load_id)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.problem = CheckpointError(f"{file} cannot be read: {error}; give a directory of a finished save")
            raise self.problem from error


class LoadPlanner(DefaultLoadPlanner):
    """Torch's planner; values that are no tensors are read with `weights_only=True`."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Raises CheckpointError for a value of another class than plain data."""
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except Exception as error:  # of pickle, which is not imported, or of torch
            raise CheckpointError(f"{name!r} of the checkpoint is no plain data: {error}") from error
        if self.flatten_state_dict:
            set_state_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found
