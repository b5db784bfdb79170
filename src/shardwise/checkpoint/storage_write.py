"""Writing under torch.distributed.checkpoint: the planner, and the StorageWriter that makes safetensors files.

DCP plans who writes what and carries results and errors between ranks. What it plans over are `TensorChunk`s, which
come from the TensorMap; the stock planners know DTensor placements only, and the stock safetensors storage keeps one
slice a tensor and file. Each rank writes one file as a stream, hashed block by block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import xxhash
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter, WriteItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.checkpoint.manifest import BLOCK_BYTES, FILE, FileRecord, Manifest, Slice, TensorRecord
from shardwise.checkpoint.staging import Source
from shardwise.checkpoint.stores import Store
from shardwise.checkpoint.tensor_chunk import TensorChunk
from shardwise.errors import CheckpointError
from shardwise.model.stored_dtypes import STORED_DTYPES
from shardwise.words import listed

Place = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
Describe = Callable[[dict[str, Any], dict[str, TensorRecord], dict[str, FileRecord]], Manifest]


class ChunkSavePlanner(SavePlanner):
    """Plans to write this rank's chunks as they are; their owners were chosen before, so nothing is written twice.

    A rank's plan goes to the coordinator as plain tuples, and an ending comes back: a `WriteItem` takes a hundred times
    as long to pickle, which training's interpreter waits for, and there is one for every tensor of every rank.

    Args:
        file: this rank's file.
        chunks: in the order of the file.
        scalars: optimizer state that is one number a parameter, of this rank's chunks.
        start: byte of the file at which the first chunk begins.

    Attributes:
        ending: of all files' names ahead of that of their kind, as the store gives it to the coordinator.
        tensors: on the coordinator, after planning, what the manifest says of each.
        all_scalars: and the scalars of all ranks.
    """

    def __init__(self, file: str, chunks: Sequence[TensorChunk], scalars: Mapping[str, Any], start: int) -> None:
        self.file, self.chunks, self.scalars, self.start = file, chunks, scalars, start
        self.ending = ""
        self.tensors: dict[str, TensorRecord] = {}
        self.all_scalars: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([], planner_data=(self.file, places_of(self.chunks, self.start), self.scalars))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Join the ranks' plans.

        Raises:
            CheckpointError: the chunks of a tensor do not make it up.
        """
        for file, places, scalars in (plan.planner_data for plan in all_plans):
            self.all_scalars |= scalars
            for place in places:
                self._add(_ending_in(self.ending, file), place)
        for name, tensor in self.tensors.items():
            stored = sum(math.prod(part.shape) for part in tensor.slices)
            if stored != math.prod(tensor.shape):
                raise CheckpointError(f"{name}: {stored} of {math.prod(tensor.shape)} elements would be written")
        return [SavePlan([], planner_data=self.ending) for _ in all_plans], Metadata({})

    def _add(self, file: str, place: Place) -> None:
        """Note one slice; the manifest's own checks see what is built here."""
        name, dtype, shape, offset, sizes, start = place
        if name not in self.tensors:
            self.tensors[name] = TensorRecord.model_construct(dtype=dtype, shape=list(shape), slices=[])
        part = Slice.model_construct(offset=list(offset), shape=list(sizes), file=file, start=start)
        self.tensors[name].slices.append(part)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.file = _ending_in(new_plan.planner_data, self.file)
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Asked of by other writers than ours, which takes bytes from the staging ring, as they were at the save."""
        raise CheckpointError(f"{write_item.index.fqn} was planned by another planner; chunks have their own writer")


def _ending_in(ending: str, file: str) -> str:
    stem, _, kind = file.rpartition(".")
    return f"{stem}{ending}.{kind}"


def places_of(chunks: Sequence[TensorChunk], first: int) -> list[Place]:
    """Return what the manifest says of each: name, dtype, global shape, offset, own shape, first byte in the file."""
    return [
        (chunk.name, STORED_DTYPES[chunk.tensor.dtype], chunk.shape, chunk.offset, tuple(chunk.tensor.shape), start)
        for chunk, start in zip(chunks, _positions(chunks, first), strict=True)
    ]


class SafetensorsWriter(StorageWriter):
    """Writes one rank's chunks as one file, and on the coordinator the manifest.

    Args:
        planner: whose chunks `staging` brings, in their order.
        describe: makes the manifest from optimizer scalars, tensors and files.
        fence: raises where another run writes into the store now, of which nothing may be touched.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        planner: ChunkSavePlanner,
        staging: Source,
        describe: Describe,
        fence: Callable[[], None],
    ) -> None:
        self.store, self.name, self.planner = store, name, planner
        self.staging, self.describe, self.fence = staging, describe, fence

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self.fence()  # before what has this checkpoint's place is cleared: it may be the other run's
            self.planner.ending = self.store.begin(self.name)

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
        if not self.planner.chunks:
            for _ in self.staging.drain():
                pass
            done.set_result([])
            return done
        try:
            with self.store.create(self.name, self.planner.file) as handle:
                for run in hashed(self.staging.drain(), record["hashes"]):
                    record["bytes"] += len(run)
                    write_all(handle, run)
        except OSError as error:
            raise self._named(error) from error
        done.set_result([WriteResult(MetadataIndex(self.planner.file), record["bytes"], record)])
        return done

    def _named(self, error: OSError) -> OSError:
        tensors = listed([chunk.name for chunk in self.planner.chunks])
        reason = f"{self.name}/{self.planner.file}, which was to hold {tensors}: {error.strerror or error}"
        return OSError(error.errno, reason)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: the manifest of all ranks' files."""
        files = {result.index.fqn: FileRecord(**result.storage_data) for rank in results for result in rank}
        tensors = dict(sorted(self.planner.tensors.items()))
        manifest = self.describe(self.planner.all_scalars, tensors, files).to_json()
        self.fence()
        try:
            self.store.commit(self.name, manifest)
        except OSError as error:
            raise OSError(error.errno, f"{self.name}/{FILE}: {error.strerror or error}") from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # the store says where a checkpoint lies


def safetensors_header(chunks: Sequence[TensorChunk]) -> bytes:
    """The safetensors header of a file of `chunks`: a length of eight bytes, then JSON, padded to eight bytes."""
    entries: dict[str, Any] = {}
    for chunk, start in zip(chunks, _positions(chunks, 0), strict=True):
        place = ",".join(str(offset) for offset in chunk.offset)
        entries[f"{chunk.name}@{place}"] = {
            "dtype": STORED_DTYPES[chunk.tensor.dtype],
            "shape": list(chunk.tensor.shape),
            "data_offsets": [start, start + chunk.bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def in_file_order(chunks: Sequence[TensorChunk]) -> list[TensorChunk]:
    """Wider items first, so that every tensor of the file is aligned to its items."""
    return sorted(chunks, key=lambda chunk: -chunk.tensor.element_size())


def _positions(chunks: Sequence[TensorChunk], first: int) -> list[int]:
    starts = [first]
    for chunk in chunks:
        starts.append(starts[-1] + chunk.bytes)
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


def write_all(handle: BinaryIO, block: memoryview) -> None:
    """Unbuffered files may take less than they are given."""
    while block:
        block = block[handle.write(block) :]
