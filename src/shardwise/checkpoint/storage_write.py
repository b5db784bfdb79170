"""Writing under torch.distributed.checkpoint: the planner, and the StorageWriter that makes safetensors files.

DCP plans who writes what and carries results and errors between ranks. What it plans over are `Piece`s, which come from
the TensorMap; the stock planners know DTensor placements only, and the stock safetensors storage keeps one slice a
tensor and file. Each rank writes one file as a stream, hashed block by block.
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
    Metadata,
    SavePlan,
    SavePlanner,
    StorageWriter,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.checkpoint.manifest import BLOCK_BYTES, FileRecord, Manifest, Slice, TensorRecord
from shardwise.checkpoint.piece import DTYPES, Piece
from shardwise.checkpoint.staging import Source
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError, listed


@dataclass
class Stored:
    """Where a slice went. All slices of a file share its record, and pickle keeps it so."""

    place: dict[str, Any]  # of a `Slice`, which is slow to pickle
    record: dict[str, Any]


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
        """Stream the staged blocks into this rank's file.

        Raises:
            OSError: with the file and the tensors that were to be in it, as the store raised it.
        """
        done: Future[list[WriteResult]] = Future()
        record: dict[str, Any] = {"bytes": 0, "hashes": []}
        if self.pieces:
            try:
                with self.store.create(self.name, self.file) as handle:
                    for run in hashed(self.staging.drain(), record["hashes"]):
                        record["bytes"] += len(run)
                        _write_all(handle, run)
            except OSError as error:
                raise self._named(error) from error
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

    def _named(self, error: OSError) -> OSError:
        tensors = listed([piece.name for piece in self.pieces])
        reason = f"{self.name}/{self.file}, which was to hold {tensors}: {error.strerror or error}"
        return OSError(error.errno, reason)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: the manifest of all ranks' files."""
        slices: dict[str, list[Slice]] = {}
        files: dict[str, FileRecord] = {}
        for result in (result for rank in results for result in rank):
            stored: Stored = result.storage_data
            place = Slice.model_construct(**stored.place)  # the manifest's own checks see what is built here
            slices.setdefault(result.index.fqn, []).append(place)
            if place.file not in files:
                files[place.file] = FileRecord(**stored.record)
        tensors: dict[str, TensorRecord] = {}
        for name, parts in sorted(slices.items()):
            known = metadata.state_dict_metadata[name]
            assert isinstance(known, TensorStorageMetadata)
            dtype = DTYPES[known.properties.dtype]
            tensors[name] = TensorRecord.model_construct(dtype=dtype, shape=list(known.size), slices=parts)
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
