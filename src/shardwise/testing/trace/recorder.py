"""Sees every operator of a traced rank, and makes its program and its memory of them.

Collectives are operators too: torch.distributed brings them to torch's dispatcher, where they are noted with the line
of code that issued them. What they return is waited for, which is noted as well.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch_compat.fsdp2 import unit_work_seen
from shardwise._torch_compat.groups import COLLECTIVE_NAMESPACES, FinishedWork, group_of_operator
from shardwise._torch_compat.operators import (
    close_range,
    device_of,
    grouped_product,
    new_empty,
    open_range,
    read_scalar,
)
from shardwise._torch_compat.pipelining import stages_made_ready_in
from shardwise._torch_compat.tracing import (
    DataDependentOutputException,
    FakeTensor,
    TorchDispatchMode,
    runs_backward,
    tree_leaves,
)
from shardwise.collectives.names import CollectiveName, current_name, group_name
from shardwise.errors import ConfigError
from shardwise.job.devices import CPU
from shardwise.job.objects import is_users_file
from shardwise.model.known_values import KnownValues
from shardwise.observe.memory import storages_of
from shardwise.parallel.layout import Layout
from shardwise.parallel.transforms import traced_stages
from shardwise.testing.places import PACKAGE, TORCH, VALUES, frames, place_of
from shardwise.testing.simulated.discipline import Discipline, HostCopy, copies_of
from shardwise.testing.simulated.streams import current_simulated_stream, timeline
from shardwise.testing.trace.program import (
    HOST_WAITS,
    POINT_TO_POINT,
    RECEIVE,
    SEND,
    THREAD_WAITS,
    Call,
    Copy,
    CopyWait,
    Entry,
    HostWork,
    Joined,
    Operators,
    Partition,
    Read,
    Wait,
)
from shardwise.testing.trace.storages import GRADIENTS, SHARDING, Storages
from shardwise.testing.trace.work import BYTES, grouped_shape, work_of

OWN = (str(Path(__file__).parent), VALUES, f"{PACKAGE}_torch_compat", f"{PACKAGE}collectives{os.sep}names.py")
COLLECTIVES = f"{PACKAGE}collectives"
WRAPPERS = ("__torch_function__", "__torch_dispatch__", "_fn", "resized")
# Operation -> the same in the words of `CollectiveName`.
OPERATIONS = {
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter", "allreduce_": "all_reduce", "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all", "broadcast_": "broadcast", "recv_": RECEIVE, "send": SEND, "barrier": "barrier",
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}  # fmt: skip
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"  # phases
OF_UNITS = ("shard", "replica")  # groups of the collectives of FSDP2's units, by name


class RankRecorder(TorchDispatchMode):
    """Notes what one rank does while it is active.

    Args:
        layout: where the rank stands; its groups are known.
        modules: of the rank, whose names say which block issues a collective.
        storages: count the memory of what the rank computes on.
        exempt: functions that use the accelerator as a step should not, and have to.

    Attributes:
        discipline: has the faults of a simulated accelerator's step.
        entries: what it does, in order, once `close` was called.
        partitions: that its calls name.
        operators: how many were dispatched.
        answer: what a read of a value gets that is not known.
        known: values of the batch, and what follows from them, where its rows are real ones.
        updating: the optimizer is at work.
    """

    def __init__(
        self,
        layout: Layout,
        modules: Mapping[str, nn.Module],
        storages: Storages,
        exempt: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.partitions: list[Partition] = []
        self.operators, self.answer, self.updating, self.noting = 0, 1, False, False
        self.known: KnownValues | None = None
        self._layout, self._storages = layout, storages
        self._names = {module: name for name, module in modules.items()}
        self._calls = self._batches = 0
        self._batch: int | None = None
        self._moments: list[int] = []  # of the entries that are operators, in the log of storages
        self._gathered: dict[int, int] = {}  # storage of a gathered unit -> the number of its call
        self._collectives: dict[Any, bool] = {}  # those that need not run: whether they return their first argument
        self._range: Any = None
        self._works: list[FinishedWork] = []  # torch holds what Python has made of a work weakly
        self._work: Counter[tuple[str | int, ...]] = Counter()
        self._launches, self._phase = 0, FORWARD
        self._of_unit: tuple[str, Hashable] | None = None  # (phase, what FSDP2 gathers or reduces)
        self._units: list[Hashable] = []  # of the entries that are operators, likewise
        self._uses: Counter[Hashable] = Counter()  # of each in the step
        self.discipline = Discipline(exempt)
        self._has_host = storages.device_type != CPU  # apart from what it computes on
        self._host_bytes, self._beside, self._answers_all = 0, False, False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Be active, and see what is no operator: batches of messages, lists of values, storages that change."""
        with ExitStack() as stack:
            stack.enter_context(self._storages.watching())
            stack.enter_context(unit_work_seen(self._on_unit))
            stack.enter_context(stages_made_ready_in(self._ahead()))
            stack.enter_context(mock.patch.object(traced_stages, "trace", self._ahead()(traced_stages.trace)))
            stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", self._batched(dist.batch_isend_irecv)))
            stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: self._listed(tensor)))
            if self._has_host:
                stack.enter_context(self.discipline.listening())
                stack.enter_context(mock.patch.object(timeline, "observers", [self._awaited]))
            yield stack.enter_context(self)

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Note nothing of what only the first step does."""
        self.close()
        before, self.noting = self.noting, False
        try:
            yield
        finally:
            self.noting = before

    @contextmanager
    def answering(self, value: int, anyone: bool = False) -> Iterator[None]:
        """Answer reads of values that are not known by `value` inside; where `anyone` asks, or our code and torch's."""
        before, self.answer, self._answers_all = (self.answer, self._answers_all), value, anyone
        try:
            yield
        finally:
            self.answer, self._answers_all = before

    @contextmanager
    def update(self) -> Iterator[None]:
        """Say that the optimizer is at work inside."""
        self.updating = True
        try:
            yield
        finally:
            self.updating = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Say that a thread of the host does what is done inside."""
        self.close()
        self._beside = True
        try:
            yield
        finally:
            self.close()
            self._beside = False

    def join(self) -> None:
        """Note that the host waits for its thread."""
        if self.noting:
            self.close()
            self.entries.append(Joined())

    def own_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        """Say that these are gradients, sharded ones and whole ones, wherever they were made."""
        self._storages.own(GRADIENTS, list(gradients), anew=True)

    def begin(self) -> None:
        """Forget what was done so far; what follows is noted."""
        self.entries.clear()
        self._gathered.clear()
        self._work.clear()
        self._launches, self._calls, self.noting = 0, 0, True
        self._storages.begin()

    def close(self) -> None:
        """Note the last operators."""
        if self._host_bytes:
            self.entries.append(HostWork(self._host_bytes, self._beside))
            self._host_bytes = 0
        if self._launches:
            self.entries.append(Operators(self._phase, self._launches, dict(self._work)))
            self._moments.append(self._storages.moment)
            self._units.append(self._of_unit)
            self._work.clear()
            self._launches = 0

    def program(self) -> tuple[Entry, ...]:
        """Return what was done, operators with whose bytes are alive at their end."""
        self.close()
        of_operators = zip(self._storages.owners_at(self._moments), self._units, strict=True)
        return tuple(
            self._told(entry, *next(of_operators)) if isinstance(entry, Operators) else entry
            for entry in _without_idle_waits(self.entries)
        )

    def _told(self, operators: Operators, memory: tuple[int, ...], unit: Hashable) -> Operators:
        return operators._replace(memory=memory, once=self._uses[unit] == 1)

    @contextmanager
    def _on_unit(self, phase: str, unit: Hashable) -> Iterator[None]:
        """Note what is dispatched inside as FSDP2's work on a unit."""
        self.close()
        before, self._of_unit, noted = self._of_unit, (phase, unit), len(self._units)
        try:
            yield
        finally:
            self.close()
            self._uses[self._of_unit] += len(self._units) > noted
            self._of_unit = before

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is device_of:
            return getattr(args[0], "fake_device", None) or func(*args)
        # A wrapper first turns the call into calls on the tensors inside it; those come back here one by one.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if func in (open_range, close_range):  # of a profiler, which FSDP2 opens by the hundred
            return self._opened(func, args) if func is open_range else None
        self.operators += 1
        in_backward = runs_backward()
        self._storages.turn(in_backward)
        if self._has_host and self.noting:
            self.discipline.before(func, args, kwargs or {})
        if func is read_scalar:
            return self._read(func, args)
        if func is grouped_product:  # torch knows its shape for bf16 alone
            output = new_empty(args[0], grouped_shape(*args, **(kwargs or {})))
        elif func in self._collectives:
            output = (args[0], None) if self._collectives[func] else None
        else:
            output = func(*args, **(kwargs or {}))
        if self._has_host and self.noting:
            self.discipline.after(func, args, kwargs or {}, output)
        if func.is_view:  # type: ignore[attr-defined]
            return output  # no memory and no kernel
        tensors = [value for value in tree_leaves((args, kwargs, output)) if isinstance(value, Tensor)]
        self._storages.see(tensors)
        namespace = func.namespace  # type: ignore[attr-defined]
        if namespace in COLLECTIVE_NAMESPACES:
            return self._called(func, args, output)
        if namespace == "fsdp":
            self._storages.own(SHARDING, args, kwargs, output)
            self._use(args)
        if not self.noting:
            return output
        work = work_of(func, args, kwargs or {}, output)
        if self._has_host and not all(map(self._storages.counts, tensors)):
            copies = copies_of(func, args, kwargs or {})
            if copies:
                self._copied(copies, output)
                return output
            if not any(map(self._storages.counts, tensors)):
                self._on_host(work)
                return output
        self._operator(work, UPDATE if self.updating else BACKWARD if in_backward else FORWARD)
        return output

    def _copied(self, copies: Sequence[HostCopy], output: Any) -> None:
        """Note copies between accelerator and host; one that makes its host tensor has it as its output."""
        self.close()
        stream = current_simulated_stream().stream_id
        for copy in copies:
            size = (output if copy.host is None else copy.host).nbytes
            number = timeline.clock(stream)[stream]
            self.entries.append(Copy(size, copy.to_host, stream, number, copy.waits))

    def _on_host(self, work: tuple[tuple[str | int, ...], int] | None) -> None:
        """Note an operator of the host's: its bytes, which tell how long an update takes there."""
        if work is not None and work[0] == BYTES:
            if self._launches:
                self.close()
            self._host_bytes += work[1]

    def _awaited(self, stream: int | None, clock: Mapping[int, int]) -> None:
        """Note that a stream, or the host, waits for others."""
        awaited = tuple((number, done) for number, done in clock.items() if done or stream not in (None, 0))
        if not self.noting or not awaited:
            return
        self.close()
        waiter = stream if stream is not None else THREAD_WAITS if self._beside else HOST_WAITS
        self.entries.append(CopyWait(waiter, awaited))

    def _opened(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return one range for all: nobody profiles."""
        if self._range is None:
            self._range = func(*args)
        return self._range

    def _operator(self, work: tuple[tuple[str | int, ...], int] | None, phase: str) -> None:
        if work is None:
            return
        if self._of_unit is not None and phase != UPDATE:
            phase, _ = self._of_unit
        if phase != self._phase:
            self.close()
            self._phase = phase
        kind, amount = work
        self._work[kind] += amount
        self._launches += 1

    def _read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return a value that a host asks for: the known one, or to our code and torch's the answer."""
        on_host, frame = self._is_on_host(args[0]), _caller()
        self.note_read(args[0], place_of(frame))
        try:
            return func(*args)
        except DataDependentOutputException:
            if not (on_host or self._answers_all) and is_users_file(frame.f_code.co_filename):
                raise
            return self.answer

    def _is_on_host(self, tensor: Tensor) -> bool:
        return self._has_host and not self._storages.counts(tensor)

    def _listed(self, tensor: Tensor) -> Any:
        """Return the values of a tensor, for which a host asks at once."""
        known = None if self.known is None else self.known.value_of(tensor)
        frame = _caller()
        if known is None and is_users_file(frame.f_code.co_filename):
            raise DataDependentOutputException(read_scalar)
        self.note_read(tensor, place_of(frame))
        return _nested([*tensor.shape], self.answer) if known is None else known.tolist()

    def note_read(self, tensor: Tensor, line: str) -> None:
        """Note that the host waits for a value of a tensor in this line, unless it has the tensor itself."""
        if self.noting and not self._is_on_host(tensor):
            self.close()
            self.entries.append(Read(line))

    # ---- collectives

    def _batched(self, batch: Callable[..., Any]) -> Callable[..., Any]:
        def together(operations: Any) -> Any:
            self._batches += 1
            self._batch = self._batches
            try:
                return batch(operations)
            finally:
                self._batch = None

        return together

    def _called(self, func: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Note a collective; its work notes that it is waited for."""
        self._remember(func, args, output)
        if self.known is not None:
            self.known.forget(leaf for leaf in tree_leaves((args, output)) if isinstance(leaf, Tensor))
        group = group_of_operator(args)
        if group is None:  # the wait of a functional collective, which is taken to wait where it is issued
            return output
        name = current_name()
        call = self._call(func, args, group, name if isinstance(name, CollectiveName) else None)
        if call.is_apart:
            self._storages.own(SHARDING, args, output)
        work = FinishedWork(lambda: None)
        if self.noting and group.size() > 1:
            self.close()
            self.entries.append(call)
            self._calls += 1
            work = FinishedWork(lambda: self._waited(call))
            if call.is_apart and isinstance(args[0], Tensor):  # what is gathered, or reduced and never copied out
                self._gathered |= {id(storage): call.number for storage in storages_of(args[0])}
        self._works.append(work)
        if func.namespace != "c10d":
            work.wait()
            return output
        return (*output[:-1], work.boxed()) if isinstance(output, tuple) else work.boxed()

    def _remember(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        """Spare later calls of a collective that returns its first argument and its work, or its work alone."""
        alone = isinstance(output, torch.ScriptObject)
        pair = isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], torch.ScriptObject)
        if func.namespace == "c10d" and (alone or (pair and _same(args[0], output[0]))):
            self._collectives[func] = pair

    def _use(self, args: tuple[Any, ...]) -> None:
        """Note that FSDP2 copies out of what it has gathered."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        numbers = [] if first is None else [self._gathered.pop(id(storage), None) for storage in storages_of(first)]
        for number in numbers:
            if number is not None:
                self.close()
                self.entries.append(Wait(number, at_use=True))

    def _waited(self, call: Call) -> None:
        self.close()
        self.entries.append(Wait(call.number))

    def _call(self, func: Any, args: tuple[Any, ...], group: dist.ProcessGroup, name: CollectiveName | None) -> Call:
        raw = func._opname
        operation = OPERATIONS.get(raw, raw.rstrip("_"))
        numbers = [value for value in args if type(value) is int]
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        is_message = operation in POINT_TO_POINT
        peer = (numbers[0] - group.rank()) % group.size() if is_message else None
        root = numbers[0] if operation == "broadcast" else None
        block, line = self._origin()
        return Call(
            self._calls, operation, group_name(group), self._partition(group), _bytes(args),
            "" if name is None else name.unit, block, line, peer, self._batch if is_message else None, root,
            name is not None and name.group in OF_UNITS,
            bool(tensors) and all(map(self._is_on_host, tensors)),
        )  # fmt: skip

    def _partition(self, group: dist.ProcessGroup) -> int:
        partition = self._layout.partition_of(group)
        if partition is None:
            raise ConfigError(
                f"--trace cannot follow a collective over ranks {dist.get_process_group_ranks(group)}, a group that "
                f"no axis of the layout has ({place_of(_caller())}); leave it out of the step"
            )
        if partition not in self.partitions:
            self.partitions.append(partition)
        return self.partitions.index(partition)

    def _origin(self) -> tuple[str, str]:
        """Return (the module that runs, the lines of code that issue what is dispatched, the outer one first)."""
        block, lines = "", [""]
        for frame in frames(sys._getframe(2)):
            code = frame.f_code
            if not block and code.co_name == "_call_impl":
                block = self._names.get(frame.f_locals["self"], "")
            if lines[0] == "" and not _is_ours(code.co_filename):
                if not code.co_filename.startswith(COLLECTIVES):
                    lines[0] = place_of(frame)
                elif len(lines) == 1:
                    lines.append(place_of(frame))
        return block, " > ".join(line for line in lines if line)


def _without_idle_waits(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Leave out waits that no copy has to do with: FSDP2's streams wait for each other at every unit."""
    copying = {entry.stream for entry in entries if isinstance(entry, Copy)}
    for entry in entries:
        if not isinstance(entry, CopyWait) or _is_for_copies(entry, copying):
            yield entry


def _is_for_copies(wait: CopyWait, copying: Set[int]) -> bool:
    aside = copying - {0}
    if wait.waiter in aside or any(stream in aside and done for stream, done in wait.streams):
        return True
    return wait.waiter < 0 and any(stream in copying for stream, _ in wait.streams)


def _is_ours(file: str) -> bool:
    return file.startswith(TORCH) or file.startswith(OWN) or file.endswith(("contextlib.py", "mock.py"))


def _caller() -> FrameType:
    """Return the frame that has called an operator: the first below that is neither torch's nor of a mode."""
    for frame in frames(sys._getframe(2)):
        code = frame.f_code
        if not (code.co_filename.startswith((TORCH, __file__, VALUES)) or code.co_name in WRAPPERS):
            return frame
    return sys._getframe(2)


def _same(one: Any, other: Any) -> bool:
    """Return whether two nests hold the same tensors."""
    left, right = tree_leaves(one), tree_leaves(other)
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _bytes(args: tuple[Any, ...]) -> int:
    """Return the bytes of the whole tensor: the largest of what goes in and what comes out."""
    sizes = [sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args]
    return max(sizes, default=0)


def _nested(shape: list[int], value: int) -> Any:
    return [_nested(shape[1:], value) for _ in range(shape[0])] if shape else value
