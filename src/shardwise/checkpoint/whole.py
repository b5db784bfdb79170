"""Whole tensors of a checkpoint, one at a time, in one process and without a process group."""

from __future__ import annotations

from collections import OrderedDict
from types import TracebackType

import torch
from torch import Tensor

from shardwise.checkpoint.checked_file import CheckedFile
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.storage_read import metadata_of, read_box, read_items
from shardwise.checkpoint.stores import Store
from shardwise.checkpoint.tensor_chunk import TensorChunk
from shardwise.job.optimizer_records import Average
from shardwise.job.optimizers import average_of
from shardwise.model.stored_dtypes import TORCH_DTYPES
from shardwise.parallel.logical_state import averaged_weight

OPEN_FILES = 32  # each holds a block; tensors lie in their files in one order, so a block is read about once


class WholeTensors:
    """Assembles logical tensors from their slices; a context manager.

    Reads are planned as a loading rank plans them, with the whole tensor as its one chunk.
    """

    def __init__(self, store: Store, name: str, manifest: Manifest) -> None:
        self.store, self.name, self.manifest = store, name, manifest
        self._metadata = metadata_of(manifest)
        self._open: OrderedDict[str, CheckedFile] = OrderedDict()

    def read(self, key: str) -> Tensor:
        """The tensor `key`, such as `model/lm_head.weight`, checked block by block.

        Raises:
            CheckpointError: a file is missing, cut short or damaged; it is named with the tensors it holds.
        """
        record = self.manifest.tensors[key]
        dtype = TORCH_DTYPES[record.dtype]
        whole = torch.empty(record.shape, dtype=dtype)
        chunk = TensorChunk(key, tuple(record.shape), (0,) * len(record.shape), whole)
        for item in read_items(chunk, self._metadata):
            number = item.storage_index.index
            assert number is not None
            target = whole
            for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                target = target.narrow(dim, offset, length)
            part = record.slices[number]
            read_box(self._file(part.file), part, dtype, item, target)
        return whole

    def read_evaluated(self, key: str) -> Tensor:
        """The tensor `key`; of a parameter what its optimizer evaluates in its place, where that is an average.

        Raises:
            CheckpointError: as `read`.
        """
        tensor, average = self.read(key), average_in(self.manifest)
        kind, _, name = key.partition("/")
        state = f"optimizer/{average.key}/{name}" if average else ""
        if average is None or kind != "model" or state not in self.manifest.tensors:
            return tensor
        return averaged_weight(tensor, self.read(state), average.factor)

    def _file(self, file: str) -> CheckedFile:
        if file not in self._open:
            if len(self._open) == OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[file] = CheckedFile(self.store, self.name, file, self.manifest)
        self._open.move_to_end(file)
        return self._open[file]

    def __enter__(self) -> WholeTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()


def average_in(manifest: Manifest) -> Average | None:
    """Return the average that a checkpoint's optimizer evaluates in the place of parameters, if it keeps one."""
    return average_of(manifest.optimizer, manifest.job.get("optimizer", {}).get("options", {}))
