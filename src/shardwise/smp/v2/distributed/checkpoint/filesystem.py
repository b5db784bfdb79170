"""Where distributed checkpoints lie: torch's file system storage, whose metadata is read without trusting it.

Torch's reader unpickles the metadata. Here only the classes that metadata consists of are made; anything else in the
file is an error. What is not a tensor is read with `weights_only=True`.
"""

from __future__ import annotations

import builtins
import importlib
import io
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from shardwise._torch_compat import set_state_element
from shardwise.errors import CheckpointError, ConfigError

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


class DistributedFileSystemReader(FileSystemReader):
    """Reads what DistributedFileSystemWriter, or torch's FileSystemWriter, has written."""

    def __init__(self, path: str | Path, **settings: Any) -> None:
        super().__init__(path_to_file_system(path), **settings)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CheckpointError where there is none, or it holds anything but metadata."""
        file = Path(self.path) / ".metadata"
        try:
            metadata = _Unpickler(io.BytesIO(file.read_bytes())).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}; give a directory of a finished save") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{file} holds a {type(metadata).__name__}, not a checkpoint's metadata")
        return metadata


class LoadPlanner(DefaultLoadPlanner):
    """Torch's planner; values that are no tensors are read with `weights_only=True`."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Raises CheckpointError for a value of another class than plain data."""
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise CheckpointError(f"{name!r} of the checkpoint is no plain data: {error}") from error
        if self.flatten_state_dict:
            set_state_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found


class _Unpickler(pickle.Unpickler):
    """Makes the classes of torch's metadata, and nothing else."""

    ALLOWED: ClassVar[dict[str, set[str]]] = {
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
        "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
        "torch.serialization": {"_get_layout"},
        "collections": {"OrderedDict"},
        "pathlib": {"Path", "PosixPath"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in {"set", "frozenset", "list", "dict", "tuple", "int", "str"}:
            return getattr(builtins, name)
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into metadata")
        return getattr(importlib.import_module(module), name)
