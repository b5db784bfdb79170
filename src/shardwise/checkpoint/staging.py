"""The bytes of a snapshot on their way to the writing thread, in bounded host memory.

A snapshot is a stream: the file's header, then its tensors one after the other, cut into blocks of a ring. Between two
updates nothing changes parameters and optimizer state, so until the next one the writing thread copies block by block
itself, as it comes to them (the lazy snapshot of DataStates-LLM, arXiv 2406.10707). The update then has what is left
copied into the ring first, and waits where the ring is full. Training is held up for

    rest = max(0, state - write speed x time to the next update)
    stall = copy(min(rest, ring)) + max(0, rest - ring) / write speed
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise._torch_compat.autograd import version_of
from shardwise.checkpoint.manifest import BLOCK_BYTES
from shardwise.errors import CheckpointError

FEWEST_BLOCKS = 2  # one is filled while one is written


class Broken(Exception):
    """The other side of the pipe has failed; its own error says why."""


@dataclass
class StagingBlock:
    """Up to BLOCK_BYTES of the stream; `ready` is the event after which a copy from the device has arrived."""

    memory: Tensor
    size: int = 0
    ready: torch.Event | None = None

    def content(self) -> memoryview:
        """The block's bytes, once they are there."""
        if self.ready is not None:
            self.ready.synchronize()
        return memoryview(self.memory.numpy())[: self.size]  # type: ignore[arg-type]


class Staging:
    """A ring of blocks that lives as long as the run, so that its pages are touched and pinned once.

    Args:
        budget: most bytes it may hold; at least two blocks are used.
        pinned: page-locked memory, for copies from a GPU that do not wait.
    """

    def __init__(self, budget: int, pinned: bool = False) -> None:
        self._pinned = pinned
        self.allow(budget)
        self._broken = threading.Event()
        self._filling = threading.Lock()  # blocks are filled by one thread at a time, in order
        self._empty()

    @property
    def bytes(self) -> int:
        """Host memory that is held now."""
        return self._made * BLOCK_BYTES

    def allow(self, budget: int) -> None:
        """Set how many bytes it may hold; what it holds already stays."""
        self.blocks = max(FEWEST_BLOCKS, budget // BLOCK_BYTES)

    def begin(self, parts: Sequence[Tensor]) -> None:
        """A new stream, of the bytes of `parts` in order; the last one has ended. Nothing is copied yet."""
        if self._broken.is_set():  # blocks were lost on the way
            self._empty()
            self._broken.clear()
        self._changed: CheckpointError | None = None
        self._blocks = _blocks(_versions(parts))

    def _empty(self) -> None:
        self._made = 0
        self._free: queue.SimpleQueue[StagingBlock] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[StagingBlock | None] = queue.SimpleQueue()

    def settle(self) -> None:
        """Copy what is left of the stream, before its tensors change. At once where nothing is.

        Of a GPU all of it, for the thread that trains has the device and the stream that made the tensors.
        """
        try:
            more, copied = True, False
            while more:
                with self._filling:
                    more = self._fill()
                copied = copied or more
        except (Broken, CheckpointError):
            return  # the writing thread says why
        except BaseException:
            self.cancel()  # the writing thread would wait for the rest
            raise
        if self._pinned and copied:
            torch.accelerator.current_stream().synchronize()

    def drain(self) -> Iterator[memoryview]:
        """The blocks of the stream, each valid until the next is asked for.

        Raises:
            Broken: it was cancelled.
            CheckpointError: a tensor changed before it was copied.
        """
        while (block := self._next()) is not None:
            yield block.content()
            self._free.put(block)

    def _next(self) -> StagingBlock | None:
        """The next full block, filled here unless the other thread is at it; of a GPU that one fills all."""
        while not self._broken.is_set():
            if not self._pinned and self._filling.acquire(blocking=False):
                try:
                    if self._full.empty():  # then all blocks are free, and filling one cannot wait
                        self._fill()
                finally:
                    self._filling.release()
            with suppress(queue.Empty):
                return self._full.get(timeout=0.1)
        raise self._changed or Broken

    def cancel(self) -> None:
        """End both sides: nothing more is taken, nothing more comes."""
        self._broken.set()

    def _fill(self) -> bool:
        """Copy the next block; whether there was one. After the last comes None. Under the lock."""
        runs = next(self._blocks, None)
        if not runs:
            if runs is not None:
                self._full.put(None)
            return False
        block = self._take()
        for run in runs:
            block.memory[run.at : run.at + run.content.numel()].copy_(run.content, non_blocking=self._pinned)
            block.size = run.at + run.content.numel()
        self._check(runs)
        self._hand_over(block)
        return True

    def _check(self, runs: Sequence[TensorBytes]) -> None:
        """Refuse to write what is half old and half new."""
        if any(run.changed for run in runs):
            self._changed = CheckpointError(
                "parameters or optimizer state were changed while they were being saved, by something other than the "
                "optimizer's step; call Checkpointer.settle() before such a change"
            )
            self.cancel()
            raise self._changed

    def _take(self) -> StagingBlock:
        while not self._broken.is_set():
            if self._free.empty() and self._made < self.blocks:
                self._made += 1
                return StagingBlock(_aligned(self._pinned))
            try:
                block = self._free.get(timeout=0.1)
            except queue.Empty:
                continue
            block.size, block.ready = 0, None
            return block
        raise Broken

    def _hand_over(self, block: StagingBlock) -> None:
        if self._pinned:
            block.ready = torch.accelerator.current_stream().record_event()
        self._full.put(block)


def _aligned(pinned: bool) -> Tensor:
    """Memory of a block that begins a page, so that a local disk can take it from there without a copy."""
    memory = torch.empty(BLOCK_BYTES + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=pinned)
    first = -memory.data_ptr() % mmap.PAGESIZE
    return memory[first : first + BLOCK_BYTES]


class Straight:
    """The same stream for a save that training waits for: the tensors' own memory, which needs no ring and no copy."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts

    def drain(self) -> Iterator[memoryview]:
        """The stream in runs, none of them across the end of a block."""
        for run in _tensor_bytes(_versions(self._parts)):
            yield memoryview(run.content.cpu().numpy())  # type: ignore[arg-type]

    def cancel(self) -> None:
        """Nobody waits at the other end."""


Source = Staging | Straight


@dataclass
class TensorBytes:
    """Bytes of one tensor that lie together in one block, from `at` on."""

    at: int
    content: Tensor
    tensor: Tensor
    version: int

    @property
    def changed(self) -> bool:
        """Return whether the tensor was written to since the stream began."""
        return version_of(self.tensor) != self.version


Versions = list[tuple[Tensor, int]]


def _versions(parts: Sequence[Tensor]) -> Versions:
    return [(part, version_of(part)) for part in parts]


def _tensor_bytes(parts: Versions) -> Iterator[TensorBytes]:
    """The bytes of `parts`, cut where a block ends; each with its place in its block."""
    at = 0
    for part, version in parts:
        flat = part.detach().contiguous().view(-1).view(torch.uint8)
        start = 0
        while start < flat.numel():
            count = min(BLOCK_BYTES - at, flat.numel() - start)
            yield TensorBytes(at, flat[start : start + count], part, version)
            start, at = start + count, (at + count) % BLOCK_BYTES


def _blocks(parts: Versions) -> Iterator[list[TensorBytes]]:
    """The runs of each block, then an empty list."""
    block: list[TensorBytes] = []
    for run in _tensor_bytes(parts):
        if run.at == 0 and block:
            yield block
            block = []
        block.append(run)
    if block:
        yield block
    yield []
