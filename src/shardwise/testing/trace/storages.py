"""The live storages of a traced rank over time, and who owns them at the peak.

Sizes are kept as a log of changes, so that an owner may be found out after the fact: what a forward has made is an
activation if it outlives that forward, and else a temporary.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from shardwise.job.devices import CPU
from shardwise.observe.memory import storages_of, tensors_of

WEIGHTS, STATE, GRADIENTS, SHARDING = "weights", "optimizer state", "gradients", "sharding buffers"
ACTIVATIONS, TEMPORARIES = "activations", "temporaries"
OWNERS = (WEIGHTS, GRADIENTS, STATE, ACTIVATIONS, SHARDING, TEMPORARIES)


class _Storage:
    """A storage that is or was alive: its bytes, the span of the step in which it was made, and its owner, if told."""

    __slots__ = ("ended", "in_backward", "made", "owner", "reference", "size")

    def __init__(self, storage: torch.UntypedStorage, made: int, in_backward: bool, forget: Any) -> None:
        self.reference = weakref.ref(storage, forget)
        self.size, self.made, self.in_backward = 0, made, in_backward
        self.ended: int | None = None
        self.owner = ""

    def resolved(self) -> str:
        """Return the owner; an activation has outlived the forward that made it."""
        if self.owner:
            return self.owner
        return ACTIVATIONS if not self.in_backward and self.ended != self.made else TEMPORARIES


class _Change(NamedTuple):
    storage: _Storage
    bytes: int


class Storages:
    """Counts the bytes of live storages while `watching`; each once, however many views it has.

    Args:
        device_type: whose memory counts.

    Attributes:
        live: bytes alive now.
        peak: most bytes alive since the last `begin`.
    """

    def __init__(self, device_type: str = CPU) -> None:
        self.device_type = device_type
        self.live = self.peak = 0
        self._known: dict[int, _Storage] = {}
        self._log: list[_Change] = []
        self._peak_at = 0
        self._span, self._in_backward = 0, False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice inside that a storage changes its size without an operator, as FSDP2's do."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (known := self._known.get(id(storage))) is not None:
                self._set(known, storage.nbytes())
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def begin(self) -> None:
        """Start the peak anew from what is alive now."""
        self._log = [_Change(known, known.size) for known in self._known.values()]
        self.peak, self._peak_at = self.live, len(self._log)

    def turn(self, in_backward: bool) -> None:
        """Begin a span of forward or of backward, if it is not that already."""
        if in_backward != self._in_backward:
            self._in_backward, self._span = in_backward, self._span + 1

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors`."""
        for tensor in tensors:
            if self.counts(tensor):
                for storage in storages_of(tensor):
                    self._set(self._of(storage), storage.nbytes())
        if self.live > self.peak:
            self.peak, self._peak_at = self.live, len(self._log)

    def own(self, owner: str, *roots: Any, anew: bool = False) -> None:
        """Say whose the storages of modules, optimizers, or containers of tensors are; the first to say so is believed.

        Args:
            anew: believe this one instead.
        """
        for root in roots:
            for tensor in filter(self.counts, tensors_of(root)):
                for storage in storages_of(tensor):
                    known = self._of(storage)
                    self._set(known, storage.nbytes())
                    if anew or not known.owner:
                        known.owner = owner

    def counts(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the memory that counts."""
        device = getattr(tensor, "fake_device", None) or tensor.device  # the first asks nobody
        return device.type == self.device_type

    @property
    def moment(self) -> int:
        """This moment, for `owners_at`."""
        return len(self._log)

    def owners(self) -> dict[str, int]:
        """Return owner -> bytes at the peak."""
        return dict(zip(OWNERS, self.owners_at([self._peak_at])[0], strict=True))

    def owners_at(self, moments: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the bytes at ascending moments, by owner in the order of `OWNERS`."""
        total: Counter[str] = Counter()
        sizes, at = [], 0
        for moment in moments:
            for change in self._log[at:moment]:
                total[change.storage.resolved()] += change.bytes
            sizes.append(tuple(total[owner] for owner in OWNERS))
            at = moment
        return sizes

    def _of(self, storage: torch.UntypedStorage) -> _Storage:
        key = id(storage)
        if (known := self._known.get(key)) is None:
            known = _Storage(storage, self._span, self._in_backward, partial(self._forget, key))
            self._known[key] = known
        return known

    def _set(self, known: _Storage, size: int) -> None:
        if size != known.size:
            self._log.append(_Change(known, size - known.size))
            self.live += size - known.size
            known.size = size

    def _forget(self, key: int, _: object) -> None:
        if (known := self._known.pop(key, None)) is not None:
            known.ended = self._span
            self._set(known, 0)
