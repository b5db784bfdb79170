"""Bytes of fake tensors by where they would be, now and at most."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor


class _Counted(NamedTuple):
    reference: weakref.ref[torch.UntypedStorage]
    where: str
    size: int


class MemoryCounts:
    """Counts live storages by their type of device; each once, however many views it has.

    Attributes:
        live: bytes alive now.
        peak: most bytes alive at once since `begin`.
    """

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._counted: dict[int, _Counted] = {}

    def begin(self, where: str) -> None:
        """Start a peak anew from what is alive now."""
        self.peak[where] = self.live[where]

    def see(self, tensor: Tensor) -> None:
        """Count the storage of a tensor that an operator returned."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._set(storage, tensor.device.type, storage.nbytes())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice inside that a storage changes its size without an operator, as FSDP2's do."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (counted := self._counted.get(id(storage))) is not None:
                self._set(storage, counted.where, storage.nbytes())
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def _set(self, storage: torch.UntypedStorage, where: str, size: int) -> None:
        key = id(storage)
        counted = self._counted.get(key)
        if counted is None:
            counted = _Counted(weakref.ref(storage, partial(self._forget, key)), where, 0)
        self._counted[key] = counted._replace(size=size)
        self.live[counted.where] += size - counted.size
        self.peak[counted.where] = max(self.peak[counted.where], self.live[counted.where])

    def _forget(self, key: int, _: object) -> None:
        counted = self._counted.pop(key)
        self.live[counted.where] -= counted.size
