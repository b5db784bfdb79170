"""The state of a run in the memory of its hosts: what those that are left go on from when one is lost.

The launcher of a host holds files without a name (memfd), which end with it, however it ends. After a step each of its
ranks writes there what it holds, in the form of a checkpoint's file, into one of two places in turn: whatever breaks
off, the other is whole. The places of all ranks of a host are read as one checkpoint, whose every block is checked.
A host that lacks a copy takes another host's: replica_memory.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Any, BinaryIO

import torch

from shardwise.checkpoint.catalog import checkpoint_name
from shardwise.checkpoint.description import RunDescription
from shardwise.checkpoint.manifest import BLOCK_BYTES, FILE, SEAL_BYTES, Manifest, Progress, Scaler, parse, seal
from shardwise.checkpoint.staging import Straight
from shardwise.checkpoint.state import Optimizer, Scalars, snapshot
from shardwise.checkpoint.storage_write import hashed, in_file_order, places_of, safetensors_header, write_all
from shardwise.checkpoint.tensor_chunk import TensorChunk
from shardwise.errors import CheckpointError, MachineError
from shardwise.kernels.precision import LossScaler
from shardwise.parallel.model import ParallelModel

COPIES = 2
ROOT = "memory of this host"
NONE = -1  # the step of a place that holds nothing whole


@dataclass(frozen=True)
class MemoryPlace:
    """One of the places of a rank: its file, and the record of what is in it, by paths under which others open them.

    Attributes:
        name: of the file in manifests.
    """

    name: str
    content: str
    record: str

    def read_record(self) -> dict[str, Any]:
        """Return the record; empty where a write has broken off."""
        with suppress(OSError, ValueError):
            with open(self.record, "rb", buffering=0) as file:
                text = file.read()
            record: dict[str, Any] = json.loads(text)
            if seal(b"{" + text[SEAL_BYTES:]) == text:
                return record
        return {}

    def discard(self) -> None:
        """Forget what is here."""
        with open(self.record, "wb"):
            pass

    @property
    def step(self) -> int:
        """The step whose state is here."""
        return int(self.read_record().get("step", NONE))

    def is_sound(self) -> bool:
        """Return whether every block here is the one that was written."""
        file, hashes, size = self.read_record().get("file", {}), list[str](), 0
        block = memoryview(bytearray(BLOCK_BYTES))
        with open(self.content, "rb") as content:
            for run in hashed(iter(lambda: block[: content.readinto(block)], b""), hashes):
                size += len(run)
        return {"bytes": size, "hashes": hashes} == file

    def write(self, step: int, chunks: Sequence[TensorChunk], about: Mapping[str, Any]) -> None:
        """Write chunks in the order of the file; `about` goes into the record, which comes last."""
        header = torch.frombuffer(bytearray(safetensors_header(chunks)), dtype=torch.uint8)
        hashes: list[str] = []
        size = 0
        with open(self.record, "wb", buffering=0) as record, open(self.content, "r+b", buffering=0) as content:
            for run in hashed(Straight([header, *(chunk.tensor for chunk in chunks)]).drain(), hashes):
                write_all(content, run)
                size += len(run)
            content.truncate(size)
            places = places_of(chunks, header.numel())
            file = {"bytes": size, "hashes": hashes}
            text = {"step": step, "file": file, "places": places, **about}
            write_all(record, memoryview(seal(json.dumps(text).encode())))


class HostMemory:
    """The places of all ranks of a host, held by its launcher; a context manager.

    Raises:
        MachineError: this system has no such files.
    """

    def __init__(self, ranks: int) -> None:
        if ranks and not hasattr(os, "memfd_create"):
            raise MachineError("checkpoint.memory_every needs files without a name, which Linux has; leave it out")
        self._files: list[int] = []
        self.places = tuple(tuple(self._place(rank, copy) for copy in range(COPIES)) for rank in range(ranks))

    def _place(self, rank: int, copy: int) -> MemoryPlace:
        content, record = (os.memfd_create(f"shardwise-{kind}-{rank}-{copy}") for kind in ("state", "record"))
        self._files += [content, record]
        path = f"/proc/{os.getpid()}/fd"
        return MemoryPlace(f"rank-{rank:05d}.safetensors", f"{path}/{content}", f"{path}/{record}")

    def steps(self) -> tuple[int, ...]:
        """Return the steps whose whole state is here."""
        return tuple(step for step in sorted(self._steps()) if MemoryStore(self.places, step).is_whole)

    def _steps(self) -> set[int]:
        steps = [{place.step for place in copies} for copies in self.places]
        return set.intersection(*steps) - {NONE} if steps else set()

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.pop())


class MemoryStore:
    """The state after one step in the memory of a host, read as a checkpoint is.

    Args:
        places: of the ranks of the host.
        step: a step that all of them have.
    """

    root = ROOT

    def __init__(self, places: Sequence[Sequence[MemoryPlace]], step: int) -> None:
        self.name = checkpoint_name(step)
        of_step = ([place for place in copies if place.step == step] for copies in places)
        self._files = {place.name: place for matches in of_step for place in matches[:1]}

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file for reading."""
        return open(self._files[file].content, "rb", buffering=0)  # type: ignore[return-value]

    @property
    def is_whole(self) -> bool:
        """True where what the ranks have written makes up every tensor."""
        with suppress(CheckpointError):
            return bool(self.manifest.tensors)
        return False

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of all ranks' records. Of slices that several hold the first is taken.

        Raises:
            DamagedError: they do not make up the tensors.
        """
        records = {name: place.read_record() for name, place in self._files.items()}
        tensors: dict[str, dict[str, Any]] = {}
        scalars: Scalars = {}
        for file, record in records.items():
            scalars |= record["scalars"]
            for name, dtype, shape, offset, sizes, start in record["places"]:
                tensor = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "slices": []})
                if not any(part["offset"] == offset for part in tensor["slices"]):
                    tensor["slices"].append({"offset": offset, "shape": sizes, "file": file, "start": start})
        about = next(iter(records.values()))["about"]
        files = {file: record["file"] for file, record in records.items()}
        content = about | {"tensors": tensors, "files": files, "optimizer_scalars": scalars}
        return parse(seal(json.dumps(content).encode()), f"{self.root}/{self.name}/{FILE}")


class StateKeeper:
    """Keeps one rank's state in its host's memory.

    Args:
        data: what a manifest says of the data.
        places: of this rank; what they hold of later steps than `step` goes.
        step: that the run goes on from.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        data: dict[str, Any],
        places: Sequence[MemoryPlace],
        step: int,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._description, self._constant = RunDescription(model, data), dict[str, Any]()
        for place in places:
            if place.step > step:
                place.discard()
        self._turns = cycle(sorted(places, key=lambda place: place.step))

    def keep(self, progress: Progress, scaler: LossScaler) -> None:
        """Copy the state after `progress.step` steps; the older copy goes. Collective the first time.

        Raises:
            CheckpointError: there is no room for it.
        """
        taken = snapshot(self._model, self._optimizer, copies=True)
        manifest = self._description.describer(progress, scaler)({}, {}, {}) if not self._constant else None
        if manifest is not None:
            self._constant = manifest.model_dump(mode="json")
        state = Scaler(scale=scaler.scale, good_steps=scaler.good_steps, hysteresis=scaler.hysteresis)
        about = self._constant | {"progress": progress.model_dump(mode="json"), "scaler": state.model_dump()}
        try:
            next(self._turns).write(
                progress.step, in_file_order(taken.chunks), {"scalars": taken.scalars, "about": about}
            )
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.memory_every={self._model.plan.job.checkpoint.memory_every}: the state cannot be kept in "
                f"the host's memory ({error.strerror}); leave it out"
            ) from error


def copied_bytes(model: ParallelModel, optimizer: Optimizer) -> int:
    """Return the host memory that all copies of this rank's state take."""
    return COPIES * sum(chunk.bytes for chunk in snapshot(model, optimizer, copies=True).chunks)
