"""Finds, at its line, what code must not do with an accelerator: where the host waits in a step, and what is a race.

`DisciplineMode` is for tests of their own. A mode that sees every operator already, as the trace's recorder, calls
`Discipline.before` and `Discipline.after` instead. Operators of other threads are seen by neither.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from types import CodeType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from shardwise._torch_compat.operators import device_of, read_scalar
from shardwise._torch_compat.simulated import (
    INDEXING,
    WAITS_FOR_VALUES,
    copy_each_into,
    copy_into,
    is_of_cpus,
    is_of_values,
    is_pinned,
    to_copy,
    touches_values,
    written_arguments,
)
from shardwise._torch_compat.tracing import DataDependentOutputException, FakeTensor, TorchDispatchMode, tree_leaves
from shardwise.observe.memory import storages_of, tensors_of
from shardwise.testing.places import PACKAGE, TORCH, VALUES, frames, shown_place
from shardwise.testing.simulated.streams import SIMULATED, current_simulated_stream, timeline

_FOLDERS = ("_torch_compat", "testing/simulated", "testing/trace")
_OWN = (*(f"{PACKAGE}{folder}{os.sep}" for folder in _FOLDERS), VALUES)
_WRAPPERS = ("contextlib.py", "mock.py")
_HOST = "cpu"


class FaultKind(StrEnum):
    """A kind of fault."""

    HOST_WAITS = "the host waits for the device"
    MADE_ON_HOST = "values of the host go to the device"
    NOT_PINNED = "a copy that must not wait has host memory that is not pinned"
    TOO_EARLY = "host memory is used while a copy of it may still run"
    OUTLIVES = "a tensor made in a step outlives it"
    CPU_ONLY = "an operator that only a CPU has"


IN_STEPS = (FaultKind.HOST_WAITS, FaultKind.MADE_ON_HOST)  # outside of steps they cost little


class DeviceFault(NamedTuple):
    """A fault.

    Attributes:
        what: the operator, or the method.
        place: file and line of the nearest frame outside of torch.
        function: that frame's, with its class.
    """

    kind: FaultKind
    what: str
    place: str
    function: str

    def __str__(self) -> str:
        return f"{self.place} ({self.function}): {self.kind}: {self.what}"


class DisciplineError(AssertionError):
    """A fault, where the first one is to end the step."""


class HostCopy(NamedTuple):
    """A copy between host and device: `host` is the tensor there, None where the copy makes it."""

    host: Tensor | None
    to_host: bool
    waits: bool


class _Running(NamedTuple):
    """A copy that nobody has waited for, by its host memory."""

    storage: weakref.ref[torch.UntypedStorage]
    bytes: range
    stream: int
    operation: int
    writes: bool


class _Place(NamedTuple):
    code: CodeType | None
    line: int

    def fault(self, kind: FaultKind, what: str) -> DeviceFault:
        if self.code is None:
            return DeviceFault(kind, what, "", "")
        return DeviceFault(kind, what, shown_place(self.code.co_filename, self.line), self.code.co_qualname)


class _Made(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    what: str
    place: _Place


class Discipline:
    """Notes faults of what is done with the simulated device while `listening`.

    Args:
        exempt: functions whose faults have to be, as `HostParameter.arrive`.
        raises: raise DisciplineError at the first one.

    Attributes:
        faults: that were noted, in order, each time.
    """

    def __init__(self, exempt: Collection[str] = (), raises: bool = False) -> None:
        self.faults: list[DeviceFault] = []
        self._exempt, self._raises = frozenset(exempt), raises
        self._in_step = False
        self._running: dict[int, list[_Running]] = {}
        self._made: dict[int, _Made] = {}

    def counts(self) -> Counter[FaultKind]:
        """Return how many faults there are of each kind."""
        return Counter(fault.kind for fault in self.faults)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note inside what is no operator: waits for streams and events, and host memory that numpy is given."""
        to_numpy = FakeTensor.numpy

        def numpy(tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
            self._use(tensor, "numpy", writes=False, stream=None)
            return to_numpy(tensor, *args, **kwargs)

        timeline.listeners.append(self._waited)
        try:
            with mock.patch.object(FakeTensor, "numpy", numpy):
                yield
        finally:
            timeline.listeners.remove(self._waited)

    @contextmanager
    def step(self, *keeps: Any) -> Iterator[None]:
        """Be in a step inside; at its end, what it has made on the device is to be gone.

        Args:
            keeps: modules, optimizers, or containers of tensors whose tensors may stay.
        """
        self._made.clear()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
        self._note_survivors(keeps)

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See an operator that is about to run."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(_is_on_device(leaf) for leaf in leaves)
        copies = copies_of(func, args, kwargs)
        for copy in copies:
            self._see_copy(func, copy)
        if not copies and touches_values(func):
            self._see_host_memory(func, args, kwargs)
        if on_device and not copies:
            self._see_waits(func, args, kwargs)
            if is_of_cpus(func):
                self._note(FaultKind.CPU_ONLY, str(func))

    def after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """See what an operator has returned."""
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if func is to_copy and outputs and outputs[0].device.type == _HOST:
            copies = copies_of(func, args, kwargs)
            if copies and not copies[0].waits:
                self._start(outputs[0], writes=True)
        if self._in_step and not func.is_view:
            self._see_made(func, outputs, (args, kwargs))

    # ---- waits

    def _waited(self, words: str) -> None:
        self._note(FaultKind.HOST_WAITS, words)

    def _see_waits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func.overloadpacket in INDEXING:
            indices = [index for index in args[1] if isinstance(index, Tensor)]
            if _is_on_device(args[0]) and any(index.device.type == _HOST for index in indices):
                self._note(FaultKind.MADE_ON_HOST, f"{func} by an index of the host")
            waits = any(_is_on_device(index) and index.dtype in (torch.bool, torch.uint8) for index in indices)
        else:
            waits = not WAITS_FOR_VALUES.isdisjoint(func.tags) and kwargs.get("output_size") is None
        if waits:
            timeline.host_learns(timeline.clock(current_simulated_stream().stream_id))
            self._note(FaultKind.HOST_WAITS, str(func))

    # ---- copies

    def _see_copy(self, func: Any, copy: HostCopy) -> None:
        stream = current_simulated_stream().stream_id
        if copy.host is not None:
            self._use(copy.host, str(func), writes=copy.to_host, stream=stream)
        pinned = copy.host is None or is_pinned(copy.host)
        if copy.waits:
            timeline.host_learns(timeline.clock(stream))
        if copy.host is not None and is_of_values(copy.host) and (copy.waits or not pinned):
            self._note(FaultKind.MADE_ON_HOST, f"{func} of values of Python's")
        elif copy.waits:
            self._note(FaultKind.HOST_WAITS, f"{func} to the {'host' if copy.to_host else 'device'}")
        elif not pinned:
            self._note(FaultKind.NOT_PINNED, str(func))
        elif copy.host is not None:
            self._start(copy.host, writes=copy.to_host)

    def _start(self, host: Tensor, writes: bool) -> None:
        """Note a copy that the host does not wait for."""
        stream = current_simulated_stream().stream_id
        operation = timeline.issue(stream)
        for storage in storages_of(host):
            running = _Running(weakref.ref(storage), _bytes_of(host, storage), stream, operation, writes)
            self._running.setdefault(id(storage), []).append(running)

    def _see_host_memory(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See whether an operator uses host memory that is still being copied."""
        if not self._running:
            return
        written = _written(func)
        for place, value in (*enumerate(args), *kwargs.items()):
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.device.type == _HOST:
                    self._use(leaf, str(func), writes=place in written, stream=None)

    def _use(self, host: Tensor, what: str, writes: bool, stream: int | None) -> None:
        """See that the host, or a copy on a stream, uses host memory."""
        for storage in storages_of(host):
            running = [one for one in self._running.get(id(storage), ()) if one.storage() is storage]
            used = _bytes_of(host, storage)
            beside = [one for one in running if max(used.start, one.bytes.start) < min(used.stop, one.bytes.stop)]
            still = [one for one in beside if not timeline.is_done(one.stream, one.operation, stream)]
            if any(one.writes or writes for one in still):
                self._note(FaultKind.TOO_EARLY, what)
            left = [one for one in running if not timeline.is_done(one.stream, one.operation, None)]
            self._running.pop(id(storage), None)
            if left:
                self._running[id(storage)] = left

    # ---- what a step leaves

    def _see_made(self, func: Any, outputs: list[Tensor], inputs: Any) -> None:
        on_device = [output for output in outputs if _is_on_device(output)]
        if not on_device:
            return
        old = {id(s) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) for s in storages_of(leaf)}
        new = [storage for output in on_device for storage in storages_of(output) if id(storage) not in old]
        if new:
            place = _place()
            for storage in new:
                self._made[id(storage)] = _Made(weakref.ref(storage), str(func), place)

    def _note_survivors(self, keeps: tuple[Any, ...]) -> None:
        if any(_alive(made) for made in self._made.values()):
            gc.collect()
        kept = {id(storage) for root in keeps for tensor in tensors_of(root) for storage in storages_of(tensor)}
        for key, made in self._made.items():
            if key not in kept and _alive(made):
                self._add(made.place.fault(FaultKind.OUTLIVES, made.what))
        self._made.clear()

    def _note(self, kind: FaultKind, what: str) -> None:
        if self._in_step or kind not in IN_STEPS:
            self._add(_place().fault(kind, what))

    def _add(self, fault: DeviceFault) -> None:
        if fault.function in self._exempt:
            return
        self.faults.append(fault)
        if self._raises:
            raise DisciplineError(str(fault))


class DisciplineMode(TorchDispatchMode):
    """Shows every operator to a `Discipline` while active; to be entered inside of the fake mode.

    Args:
        answer: what a read of a value gets, since no value is known.
    """

    def __init__(self, discipline: Discipline, answer: int = 1) -> None:
        super().__init__()
        self.discipline, self.answer = discipline, answer

    @contextmanager
    def watching(self) -> Iterator[Discipline]:
        """Be active, and listen to what is no operator."""
        with self.discipline.listening(), self:
            yield self.discipline

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is device_of:
            return getattr(args[0], "fake_device", None) or func(*args)
        # A wrapper first turns the call into calls on the tensors inside it; those come back here one by one.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        self.discipline.before(func, args, kwargs)
        try:
            output = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not read_scalar:
                raise
            output = self.answer
        self.discipline.after(func, args, kwargs, output)
        return output


@cache
def _written(func: Any) -> frozenset[int | str]:
    return written_arguments(func)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == SIMULATED


def copies_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[HostCopy]:
    """Return the copies between host and device that an operator makes."""
    if func is to_copy:
        source, target = args[0], kwargs.get("device") or args[0].device
        to_host, waits = target.type == _HOST, not kwargs.get("non_blocking")
        copy = HostCopy(None if to_host else source, to_host, waits)
        return [copy] if {source.device.type, target.type} == {_HOST, SIMULATED} else []
    if func is not copy_into and func is not copy_each_into:
        return []
    waits = not (kwargs.get("non_blocking") or args[2:3] == (True,))
    pairs = zip(args[0], args[1], strict=True) if func is copy_each_into else [(args[0], args[1])]
    return [
        HostCopy(target if target.device.type == _HOST else source, target.device.type == _HOST, waits)
        for target, source in pairs
        if {target.device.type, source.device.type} == {_HOST, SIMULATED}
    ]


def _bytes_of(tensor: Tensor, storage: torch.UntypedStorage) -> range:
    """Return from where to where a tensor's elements lie in its storage; the whole of one of several."""
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return range(storage.nbytes())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = tensor.storage_offset(), tensor.element_size()
    return range(first * size, (first + last + 1) * size if tensor.numel() else first * size)


def _alive(made: _Made) -> bool:
    storage = made.storage()
    return storage is not None and storage.nbytes() > 0


def _place() -> _Place:
    """Return the nearest line that is neither torch's nor of what simulates and traces."""
    for frame in frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not (file.startswith((TORCH, *_OWN, "<")) or file.endswith(_WRAPPERS)):
            return _Place(frame.f_code, frame.f_lineno)
    return _Place(None, 0)
