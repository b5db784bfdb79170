"""A file of a checkpoint whose every block is checked against the manifest before a byte of it is used."""

from __future__ import annotations

from types import TracebackType
from typing import BinaryIO

import xxhash

from shardwise.checkpoint.manifest import BLOCK_BYTES, OLDER, Manifest
from shardwise.checkpoint.stores import ReadableStore
from shardwise.errors import DamagedError


class CheckedFile:
    """Random reads with a memory of one block; a context manager.

    Raises:
        DamagedError: on any read that meets a missing, short or damaged file; it names the file and the tensors.
    """

    def __init__(self, store: ReadableStore, name: str, file: str, manifest: Manifest) -> None:
        self.store, self.name, self.file, self.manifest = store, name, file, manifest
        self.record = manifest.files[file]
        self._handle: BinaryIO | None = None
        self._number, self._position = -1, 0
        self._block = bytearray(min(BLOCK_BYTES, self.record.bytes))

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target` from byte `start` of the file."""
        done = 0
        while done < len(target):
            number, within = divmod(start + done, BLOCK_BYTES)
            block = self.block(number)
            count = min(len(block) - within, len(target) - done)
            target[done : done + count] = block[within : within + count]
            done += count

    def block(self, number: int) -> memoryview:
        """Block `number`, checked."""
        first = number * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.record.bytes - first)
        view = memoryview(self._block)[:size]
        if number != self._number:
            self._number = -1
            self._load(first, view)
            if xxhash.xxh3_128_hexdigest(view) != self.record.hashes[number]:
                raise self.damaged(first, size, "its bytes are not those that were written")
            self._number = number
        return view

    def damaged(self, start: int, size: int, why: str) -> DamagedError:
        """The error for `size` bytes from `start`, with the names of the tensors in them."""
        return DamagedError(
            f"{self.store.root}/{self.name}/{self.file} is damaged at bytes {start} to {start + size}: {why}; it holds "
            f"{self.manifest.held(self.file, start, start + size)}{OLDER}"
        )

    def _load(self, first: int, view: memoryview) -> None:
        try:
            if self._handle is None:
                self._handle = self.store.open(self.name, self.file)
            if self._position != first:
                self._handle.seek(first)
            self._position = -1  # a read that fails leaves it anywhere
            done = 0
            while done < len(view):
                count = self._handle.readinto(view[done:])  # type: ignore[attr-defined]
                if not count:
                    raise self.damaged(first, len(view), f"it ends after {first + done} of {self.record.bytes} bytes")
                done += count
            self._position = first + len(view)
        except OSError as error:
            raise self.damaged(first, len(view), f"it cannot be read ({error})") from error

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
