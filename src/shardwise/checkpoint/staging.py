"""The bytes of a snapshot on their way from the training thread to the writing thread, in bounded host memory.

A snapshot is a stream: the file's header, then its tensors one after the other. The training thread copies the stream
into a ring of fixed blocks and waits where none is free; the writing thread takes full blocks, and gives them back. So
training is held up for the copy of what fits into the ring and for the writing of the rest:

    stall = copy(state) + max(0, state - ring) / write speed
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import BLOCK_BYTES

FEWEST_BLOCKS = 2  # one is filled while one is written


class Broken(Exception):
    """The other side of the pipe has failed; its own error says why."""


@dataclass
class Block:
    """Up to BLOCK_BYTES of the stream; `ready` is the event after which a copy from the device has arrived."""

    memory: Tensor
    size: int = 0
    ready: torch.cuda.Event | None = None

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
        self._empty()

    @property
    def bytes(self) -> int:
        """Host memory that is held now."""
        return self._made * BLOCK_BYTES

    def allow(self, budget: int) -> None:
        """Set how many bytes it may hold; what it holds already stays."""
        self.blocks = max(FEWEST_BLOCKS, budget // BLOCK_BYTES)

    def holds(self, size: int) -> bool:
        """Whether a stream of `size` bytes can be filled in before anything is taken out."""
        return size <= self.blocks * BLOCK_BYTES

    def begin(self) -> None:
        """Ready for a new stream; the last one has ended."""
        if self._broken.is_set():  # blocks were lost on the way
            self._empty()
            self._broken.clear()

    def _empty(self) -> None:
        self._made = 0
        self._free: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[Block | None] = queue.SimpleQueue()

    def fill(self, parts: Sequence[Tensor]) -> None:
        """Copy the bytes of `parts`, in order, into blocks. Returns when all are copied, or when the writer failed."""
        try:
            block = self._take()
            for at, run in _runs(parts):
                if at == 0 and block.size:
                    self._hand_over(block)
                    block = self._take()
                block.size = at + run.numel()
                block.memory[at : block.size].copy_(run, non_blocking=self._pinned)
            self._hand_over(block)
            self._full.put(None)
            if self._pinned:
                torch.cuda.current_stream().synchronize()  # training overwrites the tensors from here on
        except Broken:
            return

    def drain(self) -> Iterator[memoryview]:
        """The blocks of the stream, each valid until the next is asked for."""
        while (block := self._full.get()) is not None and not self._broken.is_set():
            yield block.content()
            self._free.put(block)
        if self._broken.is_set():
            raise Broken

    def cancel(self) -> None:
        """End both sides: nothing more is taken, nothing more comes."""
        self._broken.set()
        self._full.put(None)

    def _take(self) -> Block:
        while not self._broken.is_set():
            if self._free.empty() and self._made < self.blocks:
                self._made += 1
                return Block(_aligned(self._pinned))
            try:
                block = self._free.get(timeout=0.1)
            except queue.Empty:
                continue
            block.size, block.ready = 0, None
            return block
        raise Broken

    def _hand_over(self, block: Block) -> None:
        if self._pinned:
            block.ready = torch.cuda.Event()
            block.ready.record()
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
        for _, run in _runs(self._parts):
            yield memoryview(run.numpy())  # type: ignore[arg-type]

    def cancel(self) -> None:
        """Nobody waits at the other end."""


Source = Staging | Straight


def _runs(parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The bytes of `parts`, cut where a block ends; each with its place in its block."""
    at = 0
    for part in parts:
        flat = part.detach().contiguous().view(-1).view(torch.uint8)
        start = 0
        while start < flat.numel():
            count = min(BLOCK_BYTES - at, flat.numel() - start)
            yield at, flat[start : start + count]
            start, at = start + count, (at + count) % BLOCK_BYTES
