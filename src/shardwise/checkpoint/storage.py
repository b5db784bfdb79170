"""Safetensors files under torch.distributed.checkpoint: the planners, the StorageWriter and the StorageReader.

DCP plans who reads what and carries results and errors between ranks. What it plans over are `Piece`s, boxes of logical
tensors, which come from the TensorMap; the stock planners know DTensor placements only, and the stock safetensors
storage keeps one slice a tensor and file. Each rank writes one file as a stream, hashed block by block; a reader takes
the bytes it needs, and checks the blocks they lie in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.checkpoint.checked_file import CheckedFile
from shardwise.checkpoint.manifest import BLOCK_BYTES, FileRecord, Manifest, Slice, TensorRecord
from shardwise.checkpoint.staging import Source
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
READ_BYTES = 1 << 26  # most of a slice that is in memory at once when it cannot be read straight to its place


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor that this rank holds.

    Attributes:
        name: key in the manifest.
        shape: global shape.
        offset: of the box, one a dim.
        tensor: its elements; read or written in place.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.shape)

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass
class Stored:
    """Where a slice went. All slices of a file share its record, and pickle keeps it so."""

    place: dict[str, Any]  # of a `Slice`, which is slow to pickle
    record: dict[str, Any]


# ------------------------------------------------------------------------------------------------------------ writing


class PieceSavePlanner(SavePlanner):
    """Plans to write this rank's pieces as they are; their owners were chosen before, so nothing is written twice.

    Args:
        pieces: in the order of the file.
        scalars: optimizer state that is one number a parameter, of this rank's pieces.
    """

    def __init__(self, pieces: Sequence[Piece], scalars: Mapping[str, Any]) -> None:
        self.pieces, self.scalars = pieces, scalars

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(piece) for piece in self.pieces], planner_data=self.scalars)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Join the ranks' plans.

        Raises:
            CheckpointError: the pieces of a tensor do not make it up.
        """
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data, name = item.tensor_data, item.index.fqn
            assert data is not None
            tensors.setdefault(name, TensorStorageMetadata(data.properties, data.size, [])).chunks.append(data.chunk)
        for name, tensor in tensors.items():
            stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if stored != math.prod(tensor.size):
                raise CheckpointError(f"{name}: {stored} of {math.prod(tensor.size)} elements would be written")
        scalars = {name: values for plan in all_plans for name, values in plan.planner_data.items()}
        return all_plans, Metadata(dict(tensors), planner_data=scalars)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The live tensor; our own writer takes its bytes from the staging ring instead, as they were at the save."""
        return next(
            p.tensor for p in self.pieces if (p.name, p.offset) == (write_item.index.fqn, write_item.index.offset)
        )


def _write_item(piece: Piece) -> WriteItem:
    data = TensorWriteData(piece.chunk, TensorProperties(dtype=piece.tensor.dtype), torch.Size(piece.shape))
    return WriteItem(MetadataIndex(piece.name, torch.Size(piece.offset)), WriteItemType.SHARD, tensor_data=data)


class SafetensorsWriter(StorageWriter):
    """Writes one rank's pieces as one file, and on the coordinator the manifest.

    Args:
        file: this rank's file.
        pieces: what `staging` brings, in this order.
        describe: makes the manifest from what DCP has gathered.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        file: str,
        pieces: Sequence[Piece],
        staging: Source,
        describe: Callable[[Metadata, dict[str, TensorRecord], dict[str, FileRecord]], Manifest],
    ) -> None:
        self.store, self.name, self.file = store, name, file
        self.pieces, self.staging, self.describe = pieces, staging, describe

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.store.begin(self.name)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream the staged blocks into this rank's file."""
        done: Future[list[WriteResult]] = Future()
        record: dict[str, Any] = {"bytes": 0, "hashes": []}
        if self.pieces:
            with self.store.create(self.name, self.file) as handle:
                for run in hashed(self.staging.drain(), record["hashes"]):
                    record["bytes"] += len(run)
                    _write_all(handle, run)
        else:
            for _ in self.staging.drain():
                pass
        starts = _positions(self.pieces, len(header(self.pieces)))
        done.set_result(
            [
                WriteResult(item.index, piece.bytes, Stored(_place(piece, self.file, start), record))
                for item, piece, start in zip(plan.items, self.pieces, starts, strict=True)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: the manifest of all ranks' files."""
        slices: dict[str, list[Slice]] = {}
        files: dict[str, FileRecord] = {}
        for result in (result for rank in results for result in rank):
            stored: Stored = result.storage_data
            place = Slice(**stored.place)
            slices.setdefault(result.index.fqn, []).append(place)
            if place.file not in files:
                files[place.file] = FileRecord(**stored.record)
        tensors: dict[str, TensorRecord] = {}
        for name, parts in sorted(slices.items()):
            known = metadata.state_dict_metadata[name]
            assert isinstance(known, TensorStorageMetadata)
            tensors[name] = TensorRecord(dtype=DTYPES[known.properties.dtype], shape=list(known.size), slices=parts)
        self.store.commit(self.name, self.describe(metadata, tensors, files).to_json())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # the store says where a checkpoint lies


def _place(piece: Piece, file: str, start: int) -> dict[str, Any]:
    return {"offset": list(piece.offset), "shape": list(piece.tensor.shape), "file": file, "start": start}


def header(pieces: Sequence[Piece]) -> bytes:
    """The safetensors header of a file of `pieces`: a length of eight bytes, then JSON, padded to eight bytes."""
    entries: dict[str, Any] = {}
    for piece, start in zip(pieces, _positions(pieces, 0), strict=True):
        place = ",".join(str(offset) for offset in piece.offset)
        entries[f"{piece.name}@{place}"] = {
            "dtype": DTYPES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [start, start + piece.bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def in_file_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Wider items first, so that every tensor of the file is aligned to its items."""
    return sorted(pieces, key=lambda piece: -piece.tensor.element_size())


def _positions(pieces: Sequence[Piece], first: int) -> list[int]:
    starts = [first]
    for piece in pieces:
        starts.append(starts[-1] + piece.bytes)
    return starts[:-1]


def hashed(stream: Iterable[memoryview], hashes: list[str]) -> Iterator[memoryview]:
    """The runs of `stream`, none of them across the end of a block; each block's hash is added to `hashes`."""
    block, filled = xxhash.xxh3_128(), 0
    for run in stream:
        block.update(run)
        filled += len(run)
        if filled == BLOCK_BYTES:
            hashes.append(block.hexdigest())
            block, filled = xxhash.xxh3_128(), 0
        yield run
    if filled:
        hashes.append(block.hexdigest())


def _write_all(handle: BinaryIO, block: memoryview) -> None:
    """Unbuffered files may take less than they are given."""
    while block:
        block = block[handle.write(block) :]


# ------------------------------------------------------------------------------------------------------------ reading


class PieceLoadPlanner(LoadPlanner):
    """Plans to fill this rank's pieces from whichever slices hold their elements."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = {(piece.name, torch.Size(piece.offset)): piece for piece in pieces if piece.tensor.numel()}
        self.metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for piece in self.pieces.values() for item in read_items(piece, self.metadata)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError("a checkpoint of shardwise holds tensors and a manifest")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        return _box(self.pieces[index.fqn, index.offset].tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def read_items(piece: Piece, metadata: Metadata) -> list[ReadItem]:
    """What has to be read for `piece`."""
    stored = metadata.state_dict_metadata[piece.name]
    assert isinstance(stored, TensorStorageMetadata)
    if tuple(stored.size) != piece.shape:
        raise CheckpointError(f"{piece.name} has shape {list(stored.size)} in the checkpoint, not {list(piece.shape)}")
    return create_read_items_for_chunk_list(piece.name, stored, [piece.chunk])


class SafetensorsReader(StorageReader):
    """Reads slices of a checkpoint, and checks every block that it touches."""

    def __init__(self, store: Store, name: str, manifest: Manifest) -> None:
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
            CheckpointError: a file is missing, cut short or damaged; it is named with the tensors it holds.
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
