"""Reading under torch.distributed.checkpoint: the planner, and the StorageReader of safetensors files.

A rank's chunks are filled from whichever slices hold their elements: DCP finds the overlaps. A reader takes the bytes
it needs, and checks the blocks they lie in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    StorageReader,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from shardwise.checkpoint.checked_file import CheckedFile
from shardwise.checkpoint.manifest import Manifest, Slice
from shardwise.checkpoint.stores import ReadableStore
from shardwise.checkpoint.tensor_chunk import TensorChunk
from shardwise.errors import DamagedError
from shardwise.model.stored_dtypes import TORCH_DTYPES

READ_BYTES = 1 << 26  # most of a slice that is in memory at once when it cannot be read straight to its place


class ChunkLoadPlanner(LoadPlanner):
    """Plans to fill this rank's chunks from whichever slices hold their elements."""

    def __init__(self, chunks: Sequence[TensorChunk]) -> None:
        self.chunks = {(chunk.name, torch.Size(chunk.offset)): chunk for chunk in chunks if chunk.tensor.numel()}
        self.metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for chunk in self.chunks.values() for item in read_items(chunk, self.metadata)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError("a checkpoint of shardwise holds tensors and a manifest")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        return _box(self.chunks[index.fqn, index.offset].tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def read_items(chunk: TensorChunk, metadata: Metadata) -> list[ReadItem]:
    """Return what has to be read for `chunk`.

    Raises:
        DamagedError: the stored tensor has another shape.
    """
    stored = metadata.state_dict_metadata[chunk.name]
    assert isinstance(stored, TensorStorageMetadata)
    if tuple(stored.size) != chunk.shape:
        raise DamagedError(f"{chunk.name} has shape {list(stored.size)} in the checkpoint, not {list(chunk.shape)}")
    return create_read_items_for_chunk_list(chunk.name, stored, [chunk.metadata])


class SafetensorsReader(StorageReader):
    """Reads slices of a checkpoint, and checks every block that it touches."""

    def __init__(self, store: ReadableStore, name: str, manifest: Manifest) -> None:
        self.store, self.name, self.manifest = store, name, manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return metadata_of(self.manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan names, file by file and front to back.

        Raises:
            DamagedError: a file is missing, cut short or damaged; it is named with the tensors it holds.
        """
        located = [(self._slice(item), item) for item in plan.items]
        by_file: dict[str, list[tuple[Slice, ReadItem]]] = {}
        for part, item in sorted(located, key=lambda pair: pair[0].start):
            by_file.setdefault(part.file, []).append((part, item))
        for file, reads in by_file.items():
            with CheckedFile(self.store, self.name, file, self.manifest) as source:
                for part, item in reads:
                    dtype = TORCH_DTYPES[self.manifest.tensors[item.storage_index.fqn].dtype]
                    read_box(source, part, dtype, item, planner.resolve_tensor(item))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # the store says where a checkpoint lies

    def _slice(self, item: ReadItem) -> Slice:
        index = item.storage_index
        assert index.index is not None
        return self.manifest.tensors[index.fqn].slices[index.index]


def metadata_of(manifest: Manifest) -> Metadata:
    """The manifest's tensors as DCP's planners see them; chunks in the order of the manifest's slices."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=TORCH_DTYPES[tensor.dtype]),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape)) for part in tensor.slices],
            )
            for name, tensor in manifest.tensors.items()
        }
    )


def read_box(source: CheckedFile, part: Slice, dtype: torch.dtype, item: ReadItem, target: Tensor) -> None:
    """Copy the box that `item` names from a stored slice to `target`, a few rows at a time."""
    shape = tuple(part.shape) or (1,)
    offsets, lengths = tuple(item.storage_offsets) or (0,), tuple(item.lengths) or (1,)
    row = math.prod(shape[1:]) * dtype.itemsize
    target = target.reshape(lengths) if target.dim() == 0 else target
    straight = lengths[1:] == shape[1:] and target.is_contiguous() and target.device.type == "cpu"
    if straight and target.dtype == dtype:
        source.read_into(_bytes(target), part.start + offsets[0] * row)
        return
    rows = max(1, READ_BYTES // max(row, 1))
    for first in range(0, lengths[0], rows):
        count = min(rows, lengths[0] - first)
        buffer = torch.empty((count, *shape[1:]), dtype=dtype)
        source.read_into(_bytes(buffer), part.start + (offsets[0] + first) * row)
        target[first : first + count].copy_(_box(buffer, (0, *offsets[1:]), (count, *lengths[1:])))


def _box(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
